import type { ComponentChildren } from "preact";

export interface Column<Row> {
  title: string;
  cell: (row: Row) => ComponentChildren;
  /** Numbers stand at the right, with digits of one width. */
  isNumber?: boolean;
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

/** A table. Where the screen is narrow each row is a card, with the column's title beside each value.
 *
 * Roles are written out: tables that are laid out as blocks lose theirs. */
export function Table<Row>({ caption, columns, rows, keyOf, empty }: TableProps<Row>) {
  if (!rows.length && empty) return <>{empty}</>;
  const classOf = (column: Column<Row>) => (column.isNumber ? "number" : undefined);
  return (
    <div class="table-scroll" tabIndex={0} role="region" aria-label={caption}>
      <table role="table">
        <caption class="hidden">{caption}</caption>
        <thead role="rowgroup">
          <tr role="row">
            {columns.map((each) => (
              <th role="columnheader" scope="col" class={classOf(each)} key={each.title}>
                {each.title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody role="rowgroup">
          {rows.map((row) => (
            <tr role="row" key={keyOf(row)}>
              {columns.map((each) => (
                <td role="cell" class={classOf(each)} key={each.title} data-title={each.title}>
                  <div>{each.cell(row)}</div>
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
