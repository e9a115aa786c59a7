// Outlines on a square of 24, drawn in the colour of the text around them.
const PATHS = {
  overview: "M3 13h4l3-8 4 14 3-6h4",
  engines: "M7 7h10v10H7zM10 10h4v4h-4zM9 3v4M15 3v4M9 17v4M15 17v4M3 9h4M3 15h4M17 9h4M17 15h4",
  requests: "M4 6h16M4 12h10M4 18h13M18 10l3 2-3 2",
  timelines: "M4 6h7M8 11h8M13 16h7M4 20h16",
  models: "M12 3l8 4.5v9L12 21l-8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9",
  tenants: "M9 11a3.5 3.5 0 100-7 3.5 3.5 0 000 7zM2.5 20c.5-4 3-6 6.5-6s6 2 6.5 6M16 4.5a3.5 3.5 0 010 6M18 14.5c2 .8 3.200 2.600 3.500 5.500",
  log: "M5 4h14v16H5zM8.500 8.500h7M8.500 12h7M8.500 15.500h4",
  chat: "M4 5h16v11h-9l-5 4v-4H4z",
  documents: "M6 3h8l4 4v14H6zM14 3v4h4M9 12h6M9 16h6",
  infer: "M4 6h5v5H4zM4 14h5v4H4zM15 9h5v6h-5zM9 8.500h3v3.500h3M9 16h3v-4",
  sun: "M12 16a4 4 0 100-8 4 4 0 000 8zM12 2v2.500M12 19.500V22M2 12h2.500M19.500 12H22M5 5l1.700 1.700M17.300 17.300L19 19M19 5l-1.700 1.700M6.700 17.300L5 19",
  moon: "M20 14.500A8.500 8.500 0 019.500 4 8.500 8.500 0 1020 14.500z",
  screen: "M3 5h18v11H3zM9 20h6M12 16v4",
  key: "M8 19a4 4 0 110-8 4 4 0 010 8zM11 12l8-8M16 7l3 3M14 9l2 2",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h11v11H9zM15 9V4H4v11h5",
  check: "M5 12.500l4.500 4.500L19 7.500",
  warning: "M12 4l9.500 16h-19zM12 10v5M12 17.500v.500",
  info: "M12 21a9 9 0 100-18 9 9 0 000 18zM12 11v5.500M12 7.500v.500",
  error: "M12 21a9 9 0 100-18 9 9 0 000 18zM9 9l6 6M15 9l-6 6",
  play: "M7 5l12 7-12 7z",
  stop: "M6 6h12v12H6z",
  refresh: "M20 11a8 8 0 00-14.500-3.500L4 9M4 4v5h5M4 13a8 8 0 0014.500 3.500L20 15M20 20v-5h-5",
  down: "M6 9l6 6 6-6",
  right: "M9 6l6 6-6 6",
  plus: "M12 5v14M5 12h14",
  trash: "M4 7h16M9 7V4h6v3M6.500 7l1 13h9l1-13M10 11v5M14 11v5",
  upload: "M12 16V4M7 9l5-5 5 5M4 16v4h16v-4",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9.500v.500",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 9.500a2.500 2.500 0 100-5 2.500 2.500 0 000 5zM9 19.500a2.500 2.500 0 100-5 2.500 2.500 0 000 5z",
  link: "M9 15l6-6M10 6l2-2a4.200 4.200 0 016 6l-2 2M14 18l-2 2a4.200 4.200 0 01-6-6l2-2",
  split: "M4 5h16v14H4zM12 5v14",
} as const;

export type IconName = keyof typeof PATHS;

/** Draws an icon. It is hidden from screen readers: the text or the label beside it says what it means. */
export function Icon({ name, size = 18 }: { name: IconName; size?: number }) {
  return (
    <svg class="icon" width={size} height={size} viewBox="0 0 24 24" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}
