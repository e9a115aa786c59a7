"""Recorded answers of the real server that Sluice does not repeat, and why."""

_REASONS = {
    "an integer that its type cannot hold is refused instead of wrapped": """
        http/infer/int32_wraps http/generate/once_max_tokens_overflow http/generate_stream/once_max_tokens_overflow
        http/generate/alltypes_overflow http/generate_stream/alltypes_overflow grpc/contents/INT8_as_int_contents
        grpc/contents/UINT8_as_uint_contents""",
    "a body that does not decompress is refused instead of read in part": """
        http/request_coding/gzip_broken http/request_coding/gzip_bad_checksum""",
    "paths are percent-decoded": """
        http/metadata_version/%31 http/config_version/%31 http/ready_version/%31
        http/route/v2/models/ide%6Etity/ready""",
    "outside /v2 the server speaks the OpenAI API, whose errors have a shape of their own": """
        http/route/ http/route/v1 http/route//v2 http/route/V2 http/route/metrics""",
    "an empty header is forwarded as the empty text that it is, not as a space": "http/params/header_empty",
    "an empty list of content codings names none, so there is nothing to refuse": "http/request_coding/empty",
    "an error is UTF-8 text whatever bytes it quotes": "http/json/not_utf8",
    "the outputs of an ensemble come in the order of its configuration": "grpc/stream/ensemble",
}

ON_PURPOSE = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Reasons by the exchange's name."""
