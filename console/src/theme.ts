// Runs before the page is drawn, so that a chosen theme does not flash. ui/theme.ts changes the choice.
const chosen = localStorage.getItem("sluice.theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
export {};
