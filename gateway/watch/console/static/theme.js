var e=localStorage.getItem("sluice.theme");(e==="light"||e==="dark")&&(document.documentElement.dataset.theme=e);
