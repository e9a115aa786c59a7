"""Draft tokens: which of the speculative configurations, and its fields."""

from engine.delegated.tensorrt_llm.configuration.parsing import (
    boolean,
    count,
    list_of,
    number,
    one_of,
    positive,
    text,
    tree,
)
from engine.delegated.tensorrt_llm.configuration.setting import Setting

_SPECULATION = "speculative_config"

DECODING_TYPE = f"{_SPECULATION}.decoding_type"

DECODING_TYPES = {
    "DraftTarget": "DraftTargetDecodingConfig",
    "Eagle": "EagleDecodingConfig",
    "Eagle3": "Eagle3DecodingConfig",
    "Lookahead": "LookaheadDecodingConfig",
    "Medusa": "MedusaDecodingConfig",
    "MTP": "MTPDecodingConfig",
    "NGram": "NGramDecodingConfig",
    "PARD": "PARDDecodingConfig",
    "SA": "SADecodingConfig",
    "AUTO": "AutoDecodingConfig",
}
"""Classes by the name that files and settings have them under."""

NEWER_TYPES = {"Eagle3": "1.3", "PARD": "1.3", "SA": "1.3"}
ENGINE_TYPES = frozenset({"Lookahead", "Medusa", "Eagle"})
"""Those that compiled engines have; the first two have only they."""

NO_DRAFTS = "none"
"""What `decoding_mode` says of sampling without drafts: nothing to configure."""

SPECULATION = (
    Setting(
        "speculative_decoding_type",
        DECODING_TYPE,
        one_of(*DECODING_TYPES, draft_target="DraftTarget", user_draft_model="DraftTarget"),
        "Where draft tokens come from.",
    ),
    Setting(
        "decoding_mode",
        DECODING_TYPE,
        one_of(
            top_k=NO_DRAFTS,
            top_p=NO_DRAFTS,
            top_k_top_p=NO_DRAFTS,
            beam_search=NO_DRAFTS,
            auto=NO_DRAFTS,
            medusa="Medusa",
            lookahead="Lookahead",
            eagle="Eagle",
        ),
        "tensorrtllm_backend's word for it; each request says how it samples.",
    ),
    Setting(
        "speculative_max_draft_len",
        f"{_SPECULATION}.max_draft_len",
        positive,
        "Most draft tokens of a request in an iteration.",
        ("num_speculative_tokens",),
    ),
    Setting(
        "speculative_model",
        f"{_SPECULATION}.speculative_model",
        text,
        "Folder of the draft model, or of Eagle's or PARD's weights.",
        ("speculative_model_dir", "draft_model_path"),
    ),
    Setting(
        "speculative_max_concurrency",
        f"{_SPECULATION}.max_concurrency",
        positive,
        "Batch size above which there are no drafts.",
        pytorch_only=True,
    ),
    Setting("speculative_load_format", f"{_SPECULATION}.load_format", text, "How the draft model is loaded."),
    Setting(
        "max_matching_ngram_size",
        f"{_SPECULATION}.max_matching_ngram_size",
        positive,
        "NGram: longest run of tokens that is searched for.",
        ("prompt_lookup_max",),
        pytorch_only=True,
    ),
    Setting(
        "ngram_is_keep_all",
        f"{_SPECULATION}.is_keep_all",
        boolean,
        "NGram: keep all continuations of a run.",
        pytorch_only=True,
    ),
    Setting(
        "ngram_is_use_oldest",
        f"{_SPECULATION}.is_use_oldest",
        boolean,
        "NGram: take the oldest, else the newest.",
        pytorch_only=True,
    ),
    Setting(
        "ngram_is_public_pool",
        f"{_SPECULATION}.is_public_pool",
        boolean,
        "NGram: one pool for all requests.",
        pytorch_only=True,
    ),
    Setting(
        "num_nextn_predict_layers",
        f"{_SPECULATION}.num_nextn_predict_layers",
        positive,
        "MTP: its layers, which are its draft tokens.",
        pytorch_only=True,
    ),
    Setting(
        "use_relaxed_acceptance_for_thinking",
        f"{_SPECULATION}.use_relaxed_acceptance_for_thinking",
        boolean,
        "MTP: accept more while a model thinks.",
        pytorch_only=True,
    ),
    Setting("relaxed_topk", f"{_SPECULATION}.relaxed_topk", positive, "MTP: accept one of so many.", pytorch_only=True),
    Setting(
        "relaxed_delta",
        f"{_SPECULATION}.relaxed_delta",
        number(0.0),
        "MTP: and so near to the likeliest.",
        pytorch_only=True,
    ),
    Setting("eagle_choices", f"{_SPECULATION}.eagle_choices", tree, "Eagle: paths of its draft tree."),
    Setting("eagle_greedy_sampling", f"{_SPECULATION}.greedy_sampling", boolean, "Eagle: accept only equal tokens."),
    Setting(
        "eagle_posterior_threshold",
        f"{_SPECULATION}.posterior_threshold",
        number(0.0, 1.0),
        "Eagle: accept likely ones.",
    ),
    Setting("eagle_use_dynamic_tree", f"{_SPECULATION}.use_dynamic_tree", boolean, "Eagle: a tree made as it goes."),
    Setting(
        "eagle_dynamic_tree_max_topk",
        f"{_SPECULATION}.dynamic_tree_max_topK",
        positive,
        "Eagle: branches of such a tree.",
    ),
    Setting(
        "eagle3_one_model",
        f"{_SPECULATION}.eagle3_one_model",
        boolean,
        "Eagle3: drafts are made within the model.",
        pytorch_only=True,
    ),
    Setting(
        "eagle3_layers_to_capture",
        f"{_SPECULATION}.eagle3_layers_to_capture",
        list_of(count),
        "Eagle3: layers that drafts are made of.",
        pytorch_only=True,
    ),
    Setting(
        "medusa_choices",
        f"{_SPECULATION}.medusa_choices",
        tree,
        "Medusa: paths of its draft tree.",
        engines_only=True,
    ),
    Setting("num_medusa_heads", f"{_SPECULATION}.num_medusa_heads", positive, "Medusa: its heads.", engines_only=True),
    Setting(
        "lookahead_window_size",
        f"{_SPECULATION}.max_window_size",
        positive,
        "Lookahead: runs that are guessed at once.",
        engines_only=True,
    ),
    Setting(
        "lookahead_ngram_size",
        f"{_SPECULATION}.max_ngram_size",
        positive,
        "Lookahead: tokens of a run.",
        engines_only=True,
    ),
    Setting(
        "lookahead_verification_set_size",
        f"{_SPECULATION}.max_verification_set_size",
        positive,
        "Lookahead: runs that are verified at once.",
        engines_only=True,
    ),
)
