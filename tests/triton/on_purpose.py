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
        http/route/v2/models/ide%6Etity/ready http/route/v2/models/identity%2Fready""",
    "of equal keys in JSON the last counts, as in every other reader": """
        http/params/duplicate_key http/json/duplicate_inputs http/json/duplicate_inputs_last
        http/json/duplicate_name""",
    "equal keys in a generate request are refused, parameters' too": """
        http/generate/json_duplicate_parameter http/generate_stream/json_duplicate_parameter""",
    "a member of another type than an extension's is the client's mistake: 400, and its name": """
        http/index/ready_text http/load/parameters_array http/load/parameter_number http/load/parameter_unknown
        http/load/config_number http/logging/info_text http/logging/info_number http/logging/verbose_text
        http/logging/verbose_negative http/trace/rate_number http/trace/rate_array http/trace/level_text
        http/shm/register_offset_negative http/shm/register_size_negative http/shm/register_size_text
        http/shm/register_key_number""",
    "a shared memory object may be registered under several names, and in each with another size": """
        http/shm/register_too_large http/shm/register_size_zero grpc/shm/register_no_name grpc/shm/register_large
        grpc/shm/status""",
    "an error response is a failure, a request refused before it reached the model none": """
        grpc/statistics/text_repeat grpc/statistics/trickle grpc/statistics/all grpc/statistics/version_alone""",
    "without a GPU, instances for one run on the CPU": "http/load/invalid/gpu",
    "an empty header is forwarded as the empty text that it is, not as a space": "http/params/header_empty",
    "an empty list of content codings names none, so there is nothing to refuse": "http/request_coding/empty",
    "an error is UTF-8 text whatever bytes it quotes": "http/json/not_utf8",
    "what no parser reads, because it is nested too deeply, is an invalid request": "http/large/unclosed_arrays",
    "what is outside /v2 is refused in OpenAI's shape": """
        http/route//v2 http/route/V2 http/route/metrics http/route/v1""",
    "a compressed body where none is read is refused as that, not as JSON that cannot be parsed": """
        http/request_coding/index""",
    "HEAD is answered wherever GET is, as HTTP asks of every server": """
        http/health/live_head http/health/ready_head http/method/server_head
        http/method/live_head http/method/ready_head http/method/metadata_head http/method/config_head
        http/method/model_ready_head http/method/stats_head http/method/all_stats_head http/method/shm_status_head
        http/method/cuda_status_head""",
    "the root says what this server is, and where things are": "http/route/",
}

ON_PURPOSE = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Reasons by the exchange's name."""

NEWER = frozenset(
    {
        "http/server_metadata",
        "grpc/server_metadata",
        "http/route/v2?x=1",
        "http/infer/add_sub_output_twice",
        "http/outputs/twice",
        "http/outputs/binary_data_twice",
        "grpc/outputs/twice",
        "http/shm/register_key_empty",
        "http/shm/out_size_missing",
        "grpc/shm/register_no_key",
    }
)
"""Answers that the release whose number Sluice presents gives otherwise than the recorded one: the version, repeated
outputs (refused), and shared memory without a key (INVALID) or of no size (a size like any other)."""

BY_CHANCE = {"http/index/after_unload": "whether the model is gone yet, right after it was unloaded"}
"""Answers that may differ or be equal."""

IN_SAMPLE = frozenset({"http/server_metadata_head"})
"""Exchanges of the sample that differ for one of these reasons, and that no other recording has."""
