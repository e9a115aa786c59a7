import pytest

from sluice.log_lines import HIDDEN, redact


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key sk-sluice-0123456789ab-AbCdEf_12-34567890 expired", f"key sk-sluice-0123456789ab-{HIDDEN} expired"),
        ("Authorization: Bearer abc.def-ghi_jkl", f"Authorization: Bearer {HIDDEN}"),
        ("authorization: basic dXNlcjpodW50ZXIy", f"authorization: basic {HIDDEN}"),
        ("sent sk-proj-abcdefghijklmnop to it", f"sent sk-{HIDDEN} to it"),
        ("redis://user:hunter2@cache:6379/0 is away", f"redis://user:{HIDDEN}@cache:6379/0 is away"),
        ("postgresql://:hunter2@db/x", f"postgresql://:{HIDDEN}@db/x"),
        ('{"api_key": "abcd1234", "model": "m"}', f'{{"api_key": "{HIDDEN}", "model": "m"}}'),
        ("password=hunter2&x=1", f"password={HIDDEN}&x=1"),
    ],
)
def test_secrets_are_hidden(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/v1/models answered with status 401",
        "loaded models/rill/1 in 2.84 s: llama, bf16",
        "pass the key with --api-key KEY, or SLUICE_API_KEY",
        "tokens_per_day: 5000 of tenant research",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert redact(text) == text
