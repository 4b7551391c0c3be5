// The page: an address such as /d/hpml-job?var-jobid=17&from=now-1h&to=now is all its state.
import { createTheme, dateTime, dateTimeForTimeZone, rangeUtil, ThemeContext } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { Alert, GlobalStyles, Icon } from '@grafana/ui';
import { useCallback, useEffect, useMemo, useState } from 'react';
import { createRoot } from 'react-dom/client';
import { useInterval, useLocalStorage, useMeasure } from 'react-use';
import { rowsOf } from './layout.js';
import { Panel } from './panel.jsx';
import { get } from './prometheus.js';
import { resolveVariables, timeScope } from './template.js';
import { TimeControls, Toolbar } from './toolbar.jsx';
import './viewer.css';

const HOME = 'hpml-cluster';
const PHONE_PIXELS = 769; // as Grafana: one column below
const GAP = 8;
const STEP = 38; // pixels from one row of the grid to the next

const addressNow = () => ({ uid: location.pathname.split('/')[2] || HOME, search: location.search });

/** The dashboard and parameters in the address; links to dashboards change it without a reload. */
function useAddress() {
  const [address, setAddress] = useState(addressNow);
  const go = useCallback((url) => {
    history.pushState(null, '', url);
    setAddress(addressNow());
  }, []);
  useEffect(() => {
    const onClick = (event) => {
      const link = event.target.closest?.('a[href^="/d/"]');
      const plain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey;
      if (link && plain && link.target !== '_blank') {
        event.preventDefault();
        go(link.getAttribute('href'));
        window.scrollTo(0, 0);
      }
    };
    const onBack = () => setAddress(addressNow());
    document.addEventListener('click', onClick);
    window.addEventListener('popstate', onBack);
    return () => {
      document.removeEventListener('click', onClick);
      window.removeEventListener('popstate', onBack);
    };
  }, [go]);
  return [address, go];
}

function useTheme() {
  const { matches: isLight } = matchMedia('(prefers-color-scheme: light)');
  const [stored, setStored] = useLocalStorage('theme', isLight ? 'light' : 'dark');
  const mode = new URLSearchParams(location.search).get('theme') ?? stored;
  return [useMemo(() => createTheme({ colors: { mode } }), [mode]), setStored];
}

function rangeOf(parameters, dashboard, timeZone) {
  const read = (text) => {
    if (/^\d+$/.test(text)) {
      return dateTimeForTimeZone(timeZone, Number(text));
    }
    return text.startsWith('now') ? text : dateTime(text);
  };
  const of = (from, to) => rangeUtil.convertRawToRange({ from: read(from), to: read(to) }, timeZone);
  const own = dashboard.time ?? { from: 'now-1h', to: 'now' };
  const range = of(parameters.get('from') ?? own.from, parameters.get('to') ?? own.to);
  return range.from.isValid() && range.to.isValid() && range.from < range.to ? range : of(own.from, own.to);
}

/** The dashboard with its time range and resolved variables; renewed with the address and each tick. */
function useView(dashboard, search, tick) {
  const [view, setView] = useState(null);
  useEffect(() => {
    if (!dashboard) {
      return undefined;
    }
    let isOld = false;
    const parameters = new URLSearchParams(search);
    const timeZone = parameters.get('timezone') ?? (dashboard.timezone || 'browser');
    const range = rangeOf(parameters, dashboard, timeZone);
    resolveVariables(dashboard, parameters, range).then(({ variables, error }) => {
      const scope = { ...timeScope(range, variables), ...variables, __dashboard: dashboard.title };
      return isOld || setView({ dashboard, range, timeZone, variables, scope, error });
    });
    return () => { isOld = true; };
  }, [dashboard, search, tick]);
  return view?.dashboard === dashboard ? view : null;
}

function Row({ row, width, view, onZoom, sync }) {
  const [folded, setFolded] = useState(row.folded);
  const unit = (width - 23 * GAP) / 24;
  const isPhone = width < PHONE_PIXELS;
  const box = ({ x, y, w, h }) => (isPhone ? { width, height: h * STEP - GAP } : {
    position: 'absolute', left: x * (unit + GAP), top: y * STEP,
    width: w * (unit + GAP) - GAP, height: h * STEP - GAP });
  return (
    <section aria-label={row.title}>
      {row.title !== undefined && (
        <h2 className="row-title">
          <button type="button" aria-expanded={!folded} onClick={() => setFolded(!folded)}>
            <Icon name={folded ? 'angle-right' : 'angle-down'} /> {row.title}
            {folded && <small>({row.placed.length} panels)</small>}
          </button>
        </h2>
      )}
      {!folded && (
        <div className={isPhone ? 'column' : 'grid'} style={{ height: isPhone ? 'auto' : row.height * STEP }}>
          {row.placed.map(({ panel, key, scope, ...place }) => {
            const style = box(place);
            return (
              <div key={key} style={style}>
                <Panel json={panel} scope={scope} view={view} width={style.width} height={style.height}
                  onZoom={onZoom} sync={sync} />
              </div>
            );
          })}
        </div>
      )}
    </section>
  );
}

function App() {
  const [{ uid, search }, go] = useAddress();
  const [theme, setTheme] = useTheme();
  const [dashboards, setDashboards] = useState([]);
  const [dashboard, setDashboard] = useState(null);
  const [error, setError] = useState('');
  const [tick, setTick] = useState(0);
  const [ref, { width }] = useMeasure();
  const view = useView(dashboard, search, tick);
  const parameters = new URLSearchParams(search);
  const refresh = parameters.get('refresh') ?? dashboard?.refresh ?? '';

  useEffect(() => { get('/api/dashboards').then(setDashboards, ({ message }) => setError(message)); }, []);
  useEffect(() => {
    setDashboard(null);
    setError('');
    get(`/api/dashboards/${uid}`).then((json) => {
      document.title = `${json.title} - hpml`;
      setDashboard(json);
    }, ({ message }) => setError(message));
  }, [uid]);
  useInterval(() => document.hidden || setTick(tick + 1),
    /^\d/.test(refresh) ? rangeUtil.intervalToMs(refresh) : null);

  const setParameters = (changes) => {
    for (const [name, values] of Object.entries(changes)) {
      parameters.delete(name);
      [values].flat().forEach((value) => parameters.append(name, value));
    }
    go(`/d/${uid}?${parameters}`);
  };
  const onTheme = (mode) => {
    setTheme(mode);
    setParameters({ theme: [] });
  };
  const onTime = (from, to) => setParameters({ from, to });
  const onZoom = ({ from, to }) => onTime(String(Math.round(from)), String(Math.round(to)));
  const sync = useCallback(() => dashboard?.graphTooltip ?? 0, [dashboard]);
  const problem = error || view?.error?.message;

  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Toolbar {...{ dashboard, dashboards, view, setParameters, onTheme }}>
        {view && (
          <TimeControls view={view} onTime={onTime} refresh={refresh} onRefreshNow={() => setTick(tick + 1)}
            onRefresh={(value) => setParameters({ refresh: value })}
            onTimeZone={(timezone) => setParameters({ timezone })} />
        )}
      </Toolbar>
      <main>
        {problem && <Alert title={problem} severity="error" />}
        <div ref={ref}>
          {view && width > 0 && rowsOf(dashboard, view.scope).map((row) => (
            <Row key={`${uid}/${row.key}`} {...{ row, width, view, onZoom, sync }} />
          ))}
        </div>
      </main>
    </ThemeContext.Provider>
  );
}

initPluginTranslations('hpml').then(() => createRoot(document.getElementById('root')).render(<App />));
