// One panel: its frame, its queries, and the visualisations, all drawn by Grafana's components.
import { EventBusSrv, FieldType, formattedValueToString, getDisplayProcessor, getDisplayValueAlignmentFactors,
  getFieldDisplayName, getFieldDisplayValues, LoadingState, renderMarkdown, textUtil } from '@grafana/data';
import { BarGauge, BigValue, DataLinksContextMenu, ErrorBoundaryAlert, PanelChrome,
  PanelContextProvider, TimeSeries, TooltipPlugin, useTheme2, VizRepeater,
  ZoomPlugin } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { useEffect, useMemo, useRef, useState } from 'react';
import { useIntersection } from 'react-use';
import { framesFor, withDefaults } from './prometheus.js';
import { expand } from './template.js';
import { Links } from './toolbar.jsx';

const eventBus = new EventBusSrv(); // one for all: crosshairs move together
const MAX_DESCRIBED = 50;
const NEAR = { rootMargin: '300px' };
const PADDING = [null, 18, null, null]; // room for half of the last label of a time axis

function Chart({ panel, frames, width, height, range, timeZone, onZoom, sync }) {
  const { legend, tooltip } = panel.options;
  return (
    <TimeSeries frames={frames} timeRange={range} timeZone={timeZone} width={width} height={height}
      legend={{ displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [], ...legend }}
      options={panel.options}>
      {(config, aligned) => (config.setPadding(PADDING),
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
  const ref = useRef(null);
  useEffect(() => {
    const grid = ref.current.querySelector('[role=grid]');
    const mark = () => {
      const hidden = grid.scrollWidth - grid.clientWidth - grid.scrollLeft;
      ref.current.toggleAttribute('data-more', hidden > 1);
    };
    if (!grid) {
      return undefined;
    }
    mark();
    grid.addEventListener('scroll', mark);
    return () => grid.removeEventListener('scroll', mark);
  }, [data, width]);
  return (
    <div ref={ref} className="table">
      <TableNG ariaLabel={title} data={data} width={width} enableVirtualization={data.length > 200}
        height={height} cellHeight={options.cellHeight ?? 'sm'} showTypeIcons={options.showTypeIcons ?? false}
        noHeader={options.showHeader === false} sortBy={options.sortBy} timeRange={range}
        enablePagination={options.enablePagination} fieldConfig={fieldConfig}
        noValue={fieldConfig.defaults.noValue} />
    </div>
  );
}

function Text({ panel: { options }, scope }) {
  const content = expand(options.content, scope, 'text');
  const html = options.mode === 'html' ? textUtil.sanitizeTextPanelContent(content) : renderMarkdown(content);
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: html }} />;
}

const VISUALISATIONS = { timeseries: Chart, stat: Stat, bargauge: Bars, table: Table, text: Text };
const SAYS_NO_DATA_ITSELF = new Set(['stat', 'bargauge', 'text']);

const isNumber = ({ type }) => type === FieldType.number;

/** The last value of each line of a chart, for those who cannot see it. */
function LastValues({ frames }) {
  const lines = frames.flatMap((frame) => frame.fields.filter(isNumber).map((field) => {
    const last = field.display(field.values.findLast((value) => value !== null));
    return `${getFieldDisplayName(field, frame, frames)}: ${formattedValueToString(last)}`;
  }));
  return (
    <ul className="sr-only" aria-label="Last values">
      {lines.slice(0, MAX_DESCRIBED).map((line, index) => <li key={index}>{line}</li>)}
    </ul>
  );
}

/** Frames of which only the series of a name is drawn. */
const isolate = (frames, name) => frames.map((frame) => ({ ...frame, fields: frame.fields.map((field) => {
  const hideFrom = { viz: isNumber(field) && getFieldDisplayName(field, frame, frames) !== name };
  return { ...field, config: { ...field.config, custom: { ...field.config.custom, hideFrom } } };
}) }));

/** Run the panel's queries when it is on the screen and view or colours are new; keeps the last frames meanwhile. */
function useFrames({ panel, scope, view, width, theme, visible }) {
  const [state, setState] = useState({});
  const shown = useRef(null);
  const wanted = useMemo(() => ({ view, theme }), [view, theme]);
  useEffect(() => {
    if (!visible || shown.current === wanted) {
      return undefined;
    }
    const controller = new AbortController();
    setState((before) => ({ ...before, loading: true }));
    const { range, timeZone } = view;
    framesFor({ panel, scope, range, width, theme, timeZone, signal: controller.signal })
      .then((frames) => ({ frames, range }), (error) => ({ error: error.message }))
      .then((next) => {
        if (!controller.signal.aborted) {
          shown.current = wanted;
          setState(next);
        }
      });
    return () => controller.abort();
  }, [visible, wanted]);
  return state;
}

export function Panel({ json, scope, view, width, height, onZoom, sync, onData }) {
  const theme = useTheme2();
  const panel = useMemo(() => withDefaults(json), [json]);
  const ref = useRef(null);
  const visible = useIntersection(ref, NEAR)?.isIntersecting;
  const [only, setOnly] = useState(null);
  const { frames, range, error, loading } = useFrames({ panel, scope, view, width, theme, visible });
  const drawn = useMemo(() => (frames && only ? isolate(frames, only) : frames), [frames, only]);
  const title = expand(json.title, scope, 'text');
  const Visualisation = VISUALISATIONS[json.type];
  const context = useMemo(() => ({ eventBus, eventsScope: 'dashboard', sync,
    onToggleSeriesVisibility: (name) => setOnly((before) => (before === name ? null : name)) }), [sync]);
  const hasData = json.type === 'text' || frames?.some(({ length }) => length);
  const isEmpty = frames && !SAYS_NO_DATA_ITSELF.has(json.type) && !hasData;
  useEffect(() => {
    if (frames || error) {
      onData(Boolean(hasData || error));
    }
  }, [frames, error]);

  const description = json.description && (() => renderMarkdown(expand(json.description, scope, 'text')));

  const content = (innerWidth, innerHeight) => {
    if (!Visualisation) {
      return <p>This viewer does not draw panels of the type {json.type}.</p>;
    }
    if (error) {
      return <p role="alert" className="panel-error" style={{ color: theme.colors.error.text }}>{error}</p>;
    }
    if (isEmpty) {
      return <p className="panel-empty">{panel.fieldConfig.defaults.noValue ?? 'No data'}</p>;
    }
    const shared = { panel, title, theme, scope, range, timeZone: view.timeZone, onZoom, sync };
    return drawn && (
      <ErrorBoundaryAlert dependencies={[drawn]}>
        {json.type === 'timeseries' && <LastValues frames={frames} />}
        <Visualisation {...shared} frames={drawn} width={innerWidth} height={innerHeight} />
      </ErrorBoundaryAlert>
    );
  };
  const state = error ? 'error' : isEmpty ? 'empty' : frames && 'drawn';
  return (
    <div ref={ref} data-panel={json.id} data-state={state} style={{ width, height }}>
      <PanelContextProvider value={context}>
        <PanelChrome title={title} description={description} width={width} height={height}
          statusMessage={error} hoverHeader={!title}
          loadingState={loading ? LoadingState.Loading : LoadingState.Done}
          displayMode={json.transparent ? 'transparent' : 'default'}
          padding={json.type === 'table' ? 'none' : 'md'}
          titleItems={<Links links={json.links} scope={scope} fill="text" />}>
          {content}
        </PanelChrome>
      </PanelContextProvider>
    </div>
  );
}
