"""Which argument of `forward` an input is, and which of its results an output. The rules are Triton's."""

from collections.abc import Mapping, Sequence

from sluice.errors import ErrorCode, SluiceError


def check_any_given(side: str, configured: Sequence[str], hint: str) -> None:
    """Raises SluiceError INVALID where the configuration has no `side`; `hint`: what to write."""
    if not configured:
        raise _invalid(
            f"model configuration must contain at least one {side}, none were specified. A PyTorch file does not say "
            f"their types and dims: write them in config.pbtxt ({hint})"
        )


def index_in(name: str) -> int | None:
    """N of a name like `anything__N`; None for other names."""
    digits = name.partition("__")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None


def positions_of_inputs(
    model: str, configured: Sequence[str], controls: Sequence[str], arguments: Sequence[str]
) -> dict[str, int]:
    """Each input's place among `arguments`, the names in `forward`.

    `configured` are all named like arguments, else all by index, else in order. `controls`, which the sequence batcher
    sets, have no order: each is one or the other. Raises SluiceError INVALID.
    """
    check_any_given("input", configured, f"forward takes {', '.join(arguments) or 'none'}")
    positions = _by_argument(configured, arguments) or _by_index(configured) or _in_order(configured)
    for name in controls:
        position = arguments.index(name) if name in arguments else index_in(name)
        if position is None:
            raise _invalid(f"input '{name}' does not follow <name>__<index> naming convention.")
        positions[name] = position
    _check_positions(model, positions, len(arguments))
    return positions


def positions_of_outputs(configured: Sequence[str], states: Sequence[str]) -> dict[str, int]:
    """Each output's place among the results: all by index, else in order; `states` by index.

    Raises SluiceError INVALID.
    """
    check_any_given("output", configured, "named <name>__<index>, or in the order of forward's results")
    positions = _by_index(configured) or _in_order(configured)
    for name in states:
        index = index_in(name)
        if index is None:
            raise _invalid(f"state '{name}' does not follow the <name>__<index> naming convention.")
        positions[name] = index
    return positions


def check_output_index(name: str, position: int, num_results: int) -> None:
    """Raises SluiceError INVALID where there is no such result."""
    if position >= num_results:
        raise _invalid(
            f"The output {name} in the model configuration refers to an output index which doesn't exist. "
            f"This model has {num_results} outputs"
        )


def positions_by_path(model: str, side: str, configured: Sequence[str], paths: Mapping[str, int]) -> dict[str, int]:
    """Each tensor's place in a package that names its tensors: by that name, or INPUT__N and OUTPUT__N.

    Raises SluiceError INVALID that says which names there are.
    """
    check_any_given(side, configured, f"the package has {', '.join(paths)}")
    count = len(set(paths.values()))
    ordinals = {f"{side.upper()}__{index}": index for index in range(count)}
    known = {**ordinals, **paths}
    for name in configured:
        if name not in known:
            raise _invalid(f"unexpected inference {side} '{name}', allowed {side}s are: {', '.join(known)}")
    positions = {name: known[name] for name in configured}
    if side == "input":
        _check_positions(model, positions, count)
    return positions


def _by_argument(names: Sequence[str], arguments: Sequence[str]) -> dict[str, int]:
    if not all(name in arguments for name in names):
        return {}
    return {name: arguments.index(name) for name in names}


def _by_index(names: Sequence[str]) -> dict[str, int]:
    found = {name: index for name in names if (index := index_in(name)) is not None}
    return found if len(found) == len(names) else {}


def _in_order(names: Sequence[str]) -> dict[str, int]:
    return {name: index for index, name in enumerate(names)}


def _check_positions(model: str, positions: Mapping[str, int], num_arguments: int) -> None:
    """Every argument gets one input."""
    if len(positions) != num_arguments:
        raise _invalid(
            f"unable to load model '{model}', configuration expects {len(positions)} inputs, model provides "
            f"{num_arguments}"
        )
    taken: dict[int, str] = {}
    for name, position in positions.items():
        if position >= num_arguments:
            raise _invalid(
                f"unable to load model '{model}', input '{name}' refers to input {position}, model provides "
                f"{num_arguments}, counted from 0"
            )
        other = taken.setdefault(position, name)
        if other != name:
            raise _invalid(f"unable to load model '{model}', inputs '{other}' and '{name}' both are input {position}")


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
