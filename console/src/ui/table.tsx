import type { ComponentChildren } from "preact";

export interface Column<Row> {
  title: string;
  cell: (row: Row) => ComponentChildren;
  /** Numbers stand at the right, with digits of one width. */
  isNumber?: boolean;
  /** Left out where the screen is narrow. */
  isExtra?: boolean;
}

export interface TableProps<Row> {
  /** What the table shows, for screen readers. */
  caption: string;
  columns: Column<Row>[];
  rows: Row[];
  keyOf: (row: Row) => string;
  /** Stands in the place of a table without rows. */
  empty?: ComponentChildren;
}

/** A table that scrolls sideways by itself where it is wider than the page. */
export function Table<Row>({ caption, columns, rows, keyOf, empty }: TableProps<Row>) {
  if (!rows.length && empty) return <>{empty}</>;
  const classOf = (column: Column<Row>) => `${column.isNumber ? "number " : ""}${column.isExtra ? "extra" : ""}`;
  return (
    <div class="table-scroll" tabIndex={0} role="region" aria-label={caption}>
      <table>
        <caption class="hidden">{caption}</caption>
        <thead>
          <tr>
            {columns.map((each) => (
              <th scope="col" class={classOf(each)} key={each.title}>
                {each.title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={keyOf(row)}>
              {columns.map((each) => (
                <td class={classOf(each)} key={each.title}>
                  {each.cell(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
