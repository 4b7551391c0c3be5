// One panel: its frame, its queries, and the visualisations, all drawn by Grafana's components.
import { EventBusSrv, formattedValueToString, getDisplayProcessor, getDisplayValueAlignmentFactors,
  getFieldDisplayName, getFieldDisplayValues, LoadingState, renderMarkdown, textUtil } from '@grafana/data';
import { BarGauge, BigValue, DataLinksContextMenu, Dropdown, ErrorBoundaryAlert, Menu, PanelChrome,
  PanelContextProvider, TimeSeries, ToolbarButton, TooltipPlugin, useTheme2, VizRepeater,
  ZoomPlugin } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { useEffect, useMemo, useRef, useState } from 'react';
import { useIntersection } from 'react-use';
import { framesFor, withDefaults } from './prometheus.js';
import { expand } from './template.js';

const eventBus = new EventBusSrv(); // one for all: crosshairs move together
const MAX_DESCRIBED = 50;
const NEAR = { rootMargin: '300px' };

function Chart({ panel, frames, width, height, range, timeZone, onZoom, sync }) {
  const { legend, tooltip } = panel.options;
  return (
    <TimeSeries frames={frames} timeRange={range} timeZone={timeZone} width={width} height={height}
      legend={{ displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [], ...legend }}
      options={panel.options}>
      {(config, aligned) => (
        <>
          <ZoomPlugin config={config} onZoom={onZoom} />
          <TooltipPlugin config={config} data={aligned} frames={frames} mode={tooltip?.mode ?? 'single'}
            sortOrder={tooltip?.sort ?? 'none'} timeZone={timeZone} sync={sync} />
        </>
      )}
    </TimeSeries>
  );
}

/** Stats and bars: one value per field or row, each with its links. */
function Values({ panel, frames, width, height, theme, timeZone, sparkline, draw, ...more }) {
  const getValues = () => getFieldDisplayValues({ data: frames, fieldConfig: panel.fieldConfig, theme,
    timeZone, sparkline, replaceVariables: (text) => text,
    reduceOptions: { calcs: ['lastNotNull'], ...panel.options.reduceOptions } });
  return (
    <VizRepeater getValues={getValues} getAlignmentFactors={getDisplayValueAlignmentFactors}
      source={frames} renderCounter={0} width={width} height={height} itemSpacing={8}
      orientation={panel.options.orientation ?? 'auto'} {...more}
      renderValue={(cell) => (cell.value.hasLinks && cell.value.getLinks ? (
        <DataLinksContextMenu links={cell.value.getLinks}>
          {({ openMenu, targetClassName }) => draw(cell, { onClick: openMenu, className: targetClassName })}
        </DataLinksContextMenu>
      ) : draw(cell, {}))} />
  );
}

function Stat(props) {
  const { panel: { options }, theme, range } = props;
  const graphMode = options.graphMode ?? 'area';
  return (
    <Values {...props} sparkline={graphMode !== 'none'} autoGrid itemSpacing={3}
      draw={({ value, width, height, alignmentFactors, count }, link) => (
        <BigValue theme={theme} value={value.display} width={width} height={height} count={count}
          sparkline={value.sparkline && { ...value.sparkline, timeRange: range }} graphMode={graphMode}
          colorMode={options.colorMode ?? 'value'} justifyMode={options.justifyMode}
          textMode={options.textMode ?? 'auto'} text={options.text} wideLayout={options.wideLayout ?? true}
          alignmentFactors={alignmentFactors} {...link} />
      )} />
  );
}

function Bars(props) {
  const { panel: { options }, theme } = props;
  return (
    <Values {...props} minVizWidth={options.minVizWidth ?? 8} minVizHeight={options.minVizHeight ?? 16}
      maxVizHeight={options.maxVizHeight ?? 300}
      draw={({ value: { field, display }, width, height, alignmentFactors, orientation, count }, link) => (
        <BarGauge theme={theme} field={field} width={width} height={height} text={options.text}
          value={count === 1 && !field.displayName ? { ...display, title: undefined } : display}
          display={getDisplayProcessor({ field: { type: 'number', config: field }, theme })}
          orientation={orientation} alignmentFactors={alignmentFactors} valueDisplayMode={options.valueMode}
          displayMode={options.displayMode ?? 'gradient'} showUnfilled={options.showUnfilled ?? true}
          {...link} />
      )} />
  );
}

function Table({ panel, frames, width, height, range, title }) {
  const { options, fieldConfig } = panel;
  const data = frames[options.frameIndex ?? 0] ?? frames[0];
  return (
    <TableNG ariaLabel={title} data={data} width={width} enableVirtualization={data.length > 200}
      height={height} cellHeight={options.cellHeight ?? 'sm'} showTypeIcons={options.showTypeIcons ?? false}
      noHeader={options.showHeader === false} sortBy={options.sortBy} timeRange={range}
      enablePagination={options.enablePagination} fieldConfig={fieldConfig} noValue={fieldConfig.defaults.noValue} />
  );
}

function Text({ panel: { options }, scope }) {
  const content = expand(options.content, scope, 'text');
  const html = options.mode === 'html' ? textUtil.sanitizeTextPanelContent(content) : renderMarkdown(content);
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: html }} />;
}

const VISUALISATIONS = { timeseries: Chart, stat: Stat, bargauge: Bars, table: Table, text: Text };
const SAYS_NO_DATA_ITSELF = new Set(['stat', 'bargauge', 'text']);

/** The last value of each line of a chart, for those who cannot see it. */
function LastValues({ frames }) {
  const lines = frames.slice(0, MAX_DESCRIBED).map((frame) => {
    const line = frame.fields[1];
    const last = line.display(line.values.findLast((value) => value !== null));
    return `${getFieldDisplayName(line, frame, frames)}: ${formattedValueToString(last)}`;
  });
  return <ul className="sr-only" aria-label="Last values">{lines.map((text) => <li key={text}>{text}</li>)}</ul>;
}

/** Frames in which only one series is drawn; all of them without a name. */
function isolate(frames, name) {
  return !name ? frames : frames.map((frame) => ({ ...frame, fields: frame.fields.map((field, index) => (
    index === 0 ? field : { ...field, config: { ...field.config, custom: { ...field.config.custom,
      hideFrom: { viz: getFieldDisplayName(field, frame, frames) !== name, legend: false, tooltip: false },
    } } })) }));
}

/** Run the panel's queries when it is on the screen and the view is new; keeps the last frames meanwhile. */
function useFrames({ panel, scope, view, width, theme, visible }) {
  const [state, setState] = useState({});
  const shown = useRef(null);
  useEffect(() => {
    if (!visible || shown.current === view) {
      return undefined;
    }
    const controller = new AbortController();
    setState((before) => ({ ...before, loading: true }));
    framesFor({ panel, scope, range: view.range, width, theme, timeZone: view.timeZone, signal: controller.signal })
      .then((frames) => ({ frames, range: view.range }), (error) => ({ error: error.message }))
      .then((next) => {
        if (!controller.signal.aborted) {
          shown.current = view;
          setState(next);
        }
      });
    return () => controller.abort();
  }, [visible, view]);
  return state;
}

function PanelLinks({ links, scope }) {
  const menu = (
    <Menu>
      {links.map(({ title, url, targetBlank }) => (
        <Menu.Item key={url} label={expand(title, scope, 'text')} target={targetBlank ? '_blank' : undefined}
          url={textUtil.sanitizeUrl(expand(url, scope, 'uriencode'))} />
      ))}
    </Menu>
  );
  return (
    <Dropdown overlay={menu}>
      <ToolbarButton icon="external-link-alt" iconSize="sm" aria-label="Links of this panel" />
    </Dropdown>
  );
}

export function Panel({ json, scope, view, width, height, onZoom, sync }) {
  const theme = useTheme2();
  const panel = useMemo(() => withDefaults(json), [json]);
  const ref = useRef(null);
  const visible = useIntersection(ref, NEAR)?.isIntersecting;
  const [only, setOnly] = useState(null);
  const { frames, range, error, loading } = useFrames({ panel, scope, view, width, theme, visible });
  const drawn = useMemo(() => frames && isolate(frames, only), [frames, only]);
  const title = expand(json.title, scope, 'text');
  const Visualisation = VISUALISATIONS[json.type];
  const context = useMemo(() => ({ eventBus, eventsScope: 'dashboard', sync,
    onToggleSeriesVisibility: (name) => setOnly((before) => (before === name ? null : name)) }), [sync]);
  const isEmpty = frames && !SAYS_NO_DATA_ITSELF.has(json.type) && !frames.some(({ length }) => length);

  const content = (innerWidth, innerHeight) => {
    if (!Visualisation) {
      return <p>This viewer does not draw panels of the type {json.type}.</p>;
    }
    if (error) {
      return <p role="alert" style={{ color: theme.colors.error.text, overflow: 'auto', height: innerHeight }}>{error}</p>;
    }
    if (isEmpty) {
      return <p className="panel-empty">{panel.fieldConfig.defaults.noValue ?? 'No data'}</p>;
    }
    return drawn && (
      <ErrorBoundaryAlert dependencies={[drawn]}>
        {json.type === 'timeseries' && <LastValues frames={frames} />}
        <Visualisation panel={panel} frames={drawn} width={innerWidth} height={innerHeight} range={range}
          title={title} theme={theme} timeZone={view.timeZone} scope={scope} onZoom={onZoom} sync={sync} />
      </ErrorBoundaryAlert>
    );
  };
  return (
    <div ref={ref} data-panel={json.id} data-type={json.type} data-state={error ? 'error' : isEmpty ? 'empty' : frames && 'drawn'}
      style={{ width, height }}>
      <PanelContextProvider value={context}>
        <PanelChrome title={title} description={json.description && (() => renderMarkdown(expand(json.description, scope, 'text')))}
          width={width} height={height} statusMessage={error} hoverHeader={!title}
          loadingState={loading ? LoadingState.Loading : LoadingState.Done}
          displayMode={json.transparent ? 'transparent' : 'default'} padding={json.type === 'table' ? 'none' : 'md'}
          titleItems={json.links?.length > 0 && <PanelLinks links={json.links} scope={scope} />}>
          {content}
        </PanelChrome>
      </PanelContextProvider>
    </div>
  );
}
