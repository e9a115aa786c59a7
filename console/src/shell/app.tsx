// The frame around the pages: the menu, the head, and what stands in a page's place while it cannot be shown.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { needsKey } from "../api/client";
import * as live from "../live/connection";
import { pages } from "../pages";
import type { Page } from "../pages/page";
import { linkTo, route } from "../router";
import { Button } from "../ui/button";
import { Icon } from "../ui/icon";
import { Empty } from "../ui/layout";
import { Questions } from "../ui/dialog";
import { ThemeButton } from "../ui/theme";
import { Toasts } from "../ui/toast";
import { isKeyAsked, KeyButton, KeyScreen } from "./key";
import { Away, ConnectionState, Gate } from "./gate";

const isMenuOpen = signal(false);
const SECTIONS = ["Operate", "Playground"] as const;

/** The whole console. */
export function App() {
  const [name = pages[0]?.name, ...words] = route.value;
  const page = pages.find((each) => each.name === name);
  useLive(page?.isForAdmins ?? false);
  const main = useFocusOnPage(page);
  const isAsking = needsKey.value || isKeyAsked.value;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => skip(event, main.current)}>
        Skip to the page
      </a>
      <div class={`shell ${isMenuOpen.value ? "menu-open" : ""}`}>
        <Top title={page?.title ?? ""} />
        <Menu current={page} />
        <main id="main" tabIndex={-1} ref={main}>
          {page?.isForAdmins && !isAsking && <Away />}
          {isAsking ? <KeyScreen /> : page ? <Shown page={page} words={words} /> : <Unknown name={name ?? ""} />}
        </main>
      </div>
      <Toasts />
      <Questions />
    </>
  );
}

function Shown({ page, words }: { page: Page; words: string[] }) {
  const view = <page.view words={words} />;
  return page.isForAdmins ? <Gate>{view}</Gate> : view;
}

function Unknown({ name }: { name: string }) {
  return (
    <Empty icon="warning" title={`There is no page “${name}”.`}>
      <a href={linkTo()}>Go to the first page</a>
    </Empty>
  );
}

/** Keeps the stream of samples open while a page of the operator is shown. */
function useLive(isNeeded: boolean): void {
  useEffect(() => {
    if (!isNeeded) return undefined;
    live.open();
    return live.close;
  }, [isNeeded]);
}

/** Names the page in the window's title, and moves the focus to it when it changes. */
function useFocusOnPage(page: Page | undefined) {
  const main = useRef<HTMLElement>(null);
  const last = useRef(page);
  useEffect(() => {
    document.title = page ? `${page.title} · Sluice` : "Sluice";
    if (last.current === page) return;
    last.current = page;
    isMenuOpen.value = false;
    scrollTo(0, 0);
    main.current?.focus({ preventScroll: true });
  }, [page]);
  return main;
}

/** The address of the page stands after #, so the link cannot. */
function skip(event: Event, main: HTMLElement | null): void {
  event.preventDefault();
  main?.focus();
}

function Top({ title }: { title: string }) {
  return (
    <header class="top">
      <Button
        class="menu-button"
        kind="quiet"
        icon={isMenuOpen.value ? "close" : "menu"}
        label="Menu"
        aria-expanded={isMenuOpen.value}
        aria-controls="menu"
        onClick={() => (isMenuOpen.value = !isMenuOpen.value)}
      />
      <a class="brand" href={linkTo()}>
        <img src="icon.svg" alt="" width="26" height="26" /> Sluice
      </a>
      <span class="top-title" aria-hidden="true">
        {title}
      </span>
      <div class="top-end">
        <ConnectionState />
        <KeyButton />
        <ThemeButton />
      </div>
    </header>
  );
}

function Menu({ current }: { current: Page | undefined }) {
  return (
    <nav class="side" id="menu" aria-label="Pages">
      {SECTIONS.map((section) => {
        const found = pages.filter((each) => each.section === section);
        if (!found.length) return null;
        return (
          <div key={section}>
            <h2>{section}</h2>
            <ul>
              {found.map((each) => (
                <li key={each.name}>
                  <a href={linkTo(each.name)} aria-current={each === current ? "page" : undefined}>
                    <Icon name={each.icon} /> {each.title}
                  </a>
                </li>
              ))}
            </ul>
          </div>
        );
      })}
    </nav>
  );
}
