"""What people write into config.pbtxt that Triton does not know, and what they should write.

Where the meaning is plain and serving it does no harm, it is taken with a note; else it is refused with the right text.
"""

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.config.fields import field_at, meant_value, unknown_field, unknown_value
from serving.config.foreign import foreign_slip
from serving.config.locations import Locations
from serving.config.reader import WrittenField
from serving.config.slip import Slip, finding_at

_BYTES = "TYPE_BYTES"


def text_slips(locations: Locations, text: str) -> list[Slip]:
    """What is wrong with names and words of a text, in its order. Syntax is protobuf's to check."""
    slips: dict[int, Slip] = {}
    for written in locations.fields:
        slip = _slip(written, locations, text)
        if slip is not None:
            slips.setdefault(slip.begin, slip)
    blocks = [slip for slip in slips.values() if slip.replacement is not None]
    return [slip for slip in slips.values() if not any(block.begin < slip.begin < block.end for block in blocks)]


def mended(text: str, slips: list[Slip]) -> str:
    """The text with every replacement. Lines keep their numbers."""
    for slip in sorted(slips, key=lambda each: each.begin, reverse=True):
        if slip.replacement is not None:
            text = text[: slip.begin] + slip.replacement + text[slip.end :]
    return text


def _slip(written: WrittenField, locations: Locations, text: str) -> Slip | None:
    names = written.names
    parent = field_at(names[:-1])
    if names[:-1] and (parent is None or parent.message_type is None):
        return None
    foreign = foreign_slip(written, locations, text)
    if foreign is not None:
        return foreign
    field = field_at(names)
    if field is None:
        message = ModelConfig.DESCRIPTOR if parent is None else parent.message_type
        return Slip(finding_at(written, unknown_field(message, names[-1])), *written.statement)
    if field.enum_type is not None and written.value is not None:
        return _enum_slip(written)
    return None


def _enum_slip(written: WrittenField) -> Slip | None:
    field = field_at(written.names)
    word = written.value or ""
    if field is None or field.enum_type is None or word in field.enum_type.values_by_name or not word.isidentifier():
        return None
    meant = meant_value(field.enum_type, word)
    remedy = f"{field.name}: {meant}" if meant else ""
    if word == _BYTES:
        finding = finding_at(written, f"{_BYTES} is read as {meant}, its name in config.pbtxt", remedy)
        return Slip(finding, written.begin, written.end, meant)
    finding = finding_at(written, unknown_value(field.enum_type, field.name, word), remedy)
    return Slip(finding, written.begin, written.end)
