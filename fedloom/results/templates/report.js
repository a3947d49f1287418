// Tables sort by the column whose head is pressed; rows of totals stay at the end.
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const key = (row) => row.cells[column].dataset.v;
    const numeric = head.classList.contains("number");
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = numeric ? parseFloat(x) - parseFloat(y) : x.localeCompare(y, undefined, { numeric: true });
      return down ? -order : order;
    };
    const rows = [...body.rows].filter((row) => !row.classList.contains("total"));
    const totals = [...body.rows].filter((row) => row.classList.contains("total"));
    body.append(...rows.sort(compare), ...totals);
  }));
}
// What is folded on screen is shown on paper.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.dataset.was = one.open; one.open = true; }));
addEventListener("afterprint", () => document.querySelectorAll("details").forEach((one) => { one.open = one.dataset.was === "true"; }));
