import { Field } from "../ui/field";

interface ModelSelectProps {
  label: string;
  names: string[];
  value: string;
  onChange: (name: string) => void;
}

/** Chooses one of the server's models. */
export function ModelSelect({ label, names, value, onChange }: ModelSelectProps) {
  return (
    <Field label={label}>
      <select value={value} onChange={(event) => onChange((event.currentTarget as HTMLSelectElement).value)}>
        {names.map((each) => (
          <option key={each} value={each}>
            {each}
          </option>
        ))}
      </select>
    </Field>
  );
}
