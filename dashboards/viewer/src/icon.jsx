// Stands in for react-inlinesvg, through which @grafana/ui draws its icons: takes them from the bundle.
import icons from 'icons';
import { useEffect } from 'react';

export default function SVG({ src, innerRef, title, onLoad, onError, ...attributes }) {
  const name = src.split('/').slice(-2).join('/');
  const isMirrored = !icons[name] && name.includes('left'); // the package has only those to the right
  const [, box, content] = (icons[isMirrored ? name.replace('left', 'right') : name] ?? '')
    .match(/viewBox="([^"]*)"[^>]*>([^]*)<\/svg>/) ?? [];
  useEffect(() => onLoad?.(src), [src]);
  return (
    <svg ref={innerRef} viewBox={box} xmlns="http://www.w3.org/2000/svg" {...attributes}
      transform={isMirrored ? 'scale(-1, 1)' : undefined} role={title ? 'img' : undefined}
      aria-label={title || undefined}
      dangerouslySetInnerHTML={{ __html: content ?? '' }} />
  );
}
