import { useEffect, useRef, useState } from "preact/hooks";
import { isDark } from "./theme";

export interface CanvasProps {
  /** What the picture shows, for screen readers. */
  label: string;
  /** Returns the height for a width, both in CSS pixels. */
  height: (width: number) => number;
  /** Draws in CSS pixels. */
  draw: (context: CanvasRenderingContext2D, width: number, height: number) => void;
  /** Returns what is at a point, for the line under the picture; "" for nothing. */
  describe?: (x: number, y: number, width: number) => string;
  /** Called with the point of a click. */
  onPick?: (x: number, y: number, width: number) => void;
}

/** A picture as wide as its place, drawn again with each change of its place, its theme or what it shows. */
export function Canvas({ label, height, draw, describe, onPick }: CanvasProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  const [point, setPoint] = useState<[number, number] | null>(null);
  const isDarkNow = isDark();
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.floor(entry?.contentRect.width ?? 0)));
    watch.observe(canvas.current?.parentElement as Element);
    return () => watch.disconnect();
  }, []);
  const tall = width ? height(width) : 0;
  useEffect(() => {
    if (canvas.current && width) redraw(canvas.current, width, tall, draw);
  }, [width, tall, draw, isDarkNow]);
  const follow = (event: PointerEvent) => setPoint([event.offsetX, event.offsetY]);
  return (
    <div>
      <canvas
        ref={canvas}
        class="drawing"
        role="img"
        aria-label={label}
        onPointerMove={describe && follow}
        onPointerLeave={() => setPoint(null)}
        onClick={onPick && ((event) => onPick(event.offsetX, event.offsetY, width))}
      />
      {describe && <p class="drawing-line">{(point && describe(...point, width)) || "\u00a0"}</p>}
    </div>
  );
}

function redraw(canvas: HTMLCanvasElement, width: number, height: number, draw: CanvasProps["draw"]): void {
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  if (!context) return;
  context.scale(scale, scale);
  draw(context, width, height);
}
