// Above the panels: dashboards, variables, links, time range, refresh, light or dark.
import { dateMath, rangeUtil, textUtil, urlUtil } from '@grafana/data';
import { Combobox, Dropdown, InlineField, Input, LinkButton, Menu, MultiCombobox, RefreshPicker,
  TimeRangePicker, ToolbarButton, useTheme2 } from '@grafana/ui';
import { ALL, expand } from './template.js';

const textOf = (time) => (dateMath.isMathString(time) ? time : String(time.valueOf()));

function Variable({ variable, onChange }) {
  const { name, multi, includeAll, options, value, type } = variable;
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
    <InlineField label={variable.hide === 1 ? undefined : label} transparent={false} tooltip={variable.description}>
      {type === 'textbox' ? (
        <Input key={value} defaultValue={value} aria-label={label} onBlur={(event) => onChange([event.target.value])} />
      ) : multi ? (
        <MultiCombobox {...shared} value={value} onChange={chooseMany} />
      ) : (
        <Combobox {...shared} value={value} onChange={(option) => onChange([option.value])} createCustomValue />
      )}
    </InlineField>
  );
}

function Links({ dashboard, dashboards, scope }) {
  return (dashboard.links ?? []).flatMap((link) => {
    const targets = link.type === 'dashboards'
      ? dashboards.filter(({ tags, uid }) => uid !== dashboard.uid && link.tags.every((tag) => tags.includes(tag)))
        .map(({ uid, title }) => ({ url: `/d/${uid}`, title }))
      : [link];
    const query = [link.keepTime && scope.__url_time_range(), link.includeVars && scope.__all_variables()];
    return targets.map(({ url, title }) => (
      <LinkButton key={`${title} ${url}`} variant="secondary" size="sm" tooltip={link.tooltip || undefined}
        icon={link.type === 'dashboards' || url.startsWith('/d/') ? 'apps' : 'external-link-alt'}
        target={link.targetBlank ? '_blank' : undefined}
        href={textUtil.sanitizeUrl(query.filter(Boolean).reduce(urlUtil.appendQueryToUrl, expand(url, scope, 'uriencode')))}>
        {expand(title, scope, 'text')}
      </LinkButton>
    ));
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
  const menu = (
    <Menu ariaLabel="Dashboards">
      {dashboards.map(({ uid, title }) => (
        <Menu.Item key={uid} label={title} active={uid === dashboard?.uid}
          url={view ? urlUtil.appendQueryToUrl(`/d/${uid}`, view.scope.__url_time_range()) : `/d/${uid}`} />
      ))}
    </Menu>
  );
  const shown = Object.values(view?.variables ?? {}).filter(({ hide, type }) => hide !== 2 && type !== 'datasource');
  return (
    <header className="toolbar" style={{ background: theme.colors.background.canvas }}>
      <div className="toolbar-line" style={{ borderBottom: `1px solid ${theme.colors.border.weak}` }}>
        <Dropdown overlay={menu} placement="bottom-start">
          <ToolbarButton icon="apps" variant="canvas" isOpen={false} aria-label="All dashboards">Dashboards</ToolbarButton>
        </Dropdown>
        <h1 className="toolbar-title">{dashboard?.title}</h1>
        {children}
        <ToolbarButton icon="palette" onClick={onTheme} aria-label={`Switch to ${theme.isDark ? 'light' : 'dark'} theme`}
          tooltip={`Switch to ${theme.isDark ? 'light' : 'dark'} theme`} />
      </div>
      <div className="toolbar-line">
        {shown.map((variable) => (
          <Variable key={variable.name} variable={variable}
            onChange={(values) => setParameters({ [`var-${variable.name}`]: values })} />
        ))}
        {view && <Links dashboard={dashboard} dashboards={dashboards} scope={view.scope} />}
      </div>
    </header>
  );
}

/** Milliseconds of a refresh interval such as 30s; undefined for none. */
export const refreshMs = (text) => (text && text !== 'off' ? rangeUtil.intervalToMs(text) : undefined);
