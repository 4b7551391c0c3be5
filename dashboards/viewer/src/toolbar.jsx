// Above the panels: dashboards, variables, links, time range, refresh, light or dark.
import { dateMath, textUtil, urlUtil } from '@grafana/data';
import { Combobox, Dropdown, InlineField, LinkButton, Menu, MultiCombobox, RefreshPicker,
  TimeRangePicker, ToolbarButton, useTheme2 } from '@grafana/ui';
import { ALL, expand } from './template.js';

const textOf = (time) => (dateMath.isMathString(time) ? time : String(time.valueOf()));

function Variable({ variable, onChange }) {
  const { name, multi, includeAll, options, value } = variable;
  const label = variable.label || name;
  const known = includeAll ? [{ label: 'All', value: ALL }, ...options] : options;
  const shared = { options: known, width: 'auto', minWidth: 12, maxWidth: 60, 'aria-label': label };
  const chooseMany = (picked) => {
    const values = picked.map((option) => option.value);
    const others = values.filter((one) => one !== ALL);
    const all = values.at(-1) === ALL || !others.length;
    onChange(all ? [includeAll ? ALL : options[0]?.value] : others);
  };
  return (
    <InlineField label={label}>
      {multi ? (
        <MultiCombobox {...shared} value={value} onChange={chooseMany} />
      ) : (
        <Combobox {...shared} value={value} createCustomValue onChange={(option) => onChange([option.value])} />
      )}
    </InlineField>
  );
}

/** Links of a dashboard or panel, with the time range and variables that they keep. */
export function Links({ links = [], scope, fill = 'solid' }) {
  return links.map(({ title, url, keepTime, includeVars, targetBlank }) => {
    const query = [keepTime && scope.__url_time_range(), includeVars && scope.__all_variables()];
    const address = query.filter(Boolean).reduce(urlUtil.appendQueryToUrl, expand(url, scope, 'uriencode'));
    return (
      <LinkButton key={url} variant="secondary" size="sm" fill={fill} href={textUtil.sanitizeUrl(address)}
        icon={url.startsWith('/d/') ? 'apps' : 'external-link-alt'} target={targetBlank ? '_blank' : undefined}>
        {expand(title, scope, 'text')}
      </LinkButton>
    );
  });
}

export function TimeControls({ view, onTime, refresh, onRefresh, onRefreshNow, onTimeZone }) {
  const { range, timeZone } = view;
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  const half = Math.round((to - from) / 2);
  return (
    <>
      <TimeRangePicker value={range} timeZone={timeZone} onChangeTimeZone={onTimeZone} isOnCanvas
        onChange={({ raw }) => onTime(textOf(raw.from), textOf(raw.to))}
        onMoveBackward={() => onTime(String(from - half), String(to - half))}
        onMoveForward={() => onTime(String(from + half), String(to + half))}
        onZoom={() => onTime(String(from - half), String(to + half))} />
      <RefreshPicker value={refresh} onIntervalChanged={onRefresh} onRefresh={onRefreshNow} isOnCanvas
        intervals={['5s', '10s', '30s', '1m', '5m', '15m', '1h']} tooltip="Refresh" />
    </>
  );
}

export function Toolbar({ dashboard, dashboards, view, setParameters, onTheme, children }) {
  const theme = useTheme2();
  const other = theme.isDark ? 'light' : 'dark';
  const menu = (
    <Menu ariaLabel="Dashboards">
      {dashboards.map(({ uid, title }) => (
        <Menu.Item key={uid} label={title} active={uid === dashboard?.uid}
          url={view ? urlUtil.appendQueryToUrl(`/d/${uid}`, view.scope.__url_time_range()) : `/d/${uid}`} />
      ))}
    </Menu>
  );
  const shown = Object.values(view?.variables ?? {})
    .filter(({ hide, type }) => hide !== 2 && type !== 'datasource');
  return (
    <header className="toolbar" style={{ background: theme.colors.background.canvas }}>
      <div className="toolbar-line" style={{ borderBottom: `1px solid ${theme.colors.border.weak}` }}>
        <Dropdown overlay={menu} placement="bottom-start">
          <ToolbarButton icon="apps" variant="canvas" isOpen={false} aria-label="Dashboards">
            Dashboards
          </ToolbarButton>
        </Dropdown>
        <h1 className="toolbar-title">{dashboard?.title}</h1>
        {children}
        <ToolbarButton icon="palette" onClick={() => onTheme(other)} tooltip={`Switch to ${other} theme`} />
      </div>
      <div className="toolbar-line">
        {shown.map((variable) => (
          <Variable key={variable.name} variable={variable}
            onChange={(values) => setParameters({ [`var-${variable.name}`]: values })} />
        ))}
        {view && <Links links={dashboard.links} scope={view.scope} />}
      </div>
    </header>
  );
}
