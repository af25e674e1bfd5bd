"""Fields of OpenAI and of well-known servers that this version lacks, and the values that ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping

from gammaray.api.fields import NO_TOOLS
from gammaray.validation import Planned

BOTH_ROUTES: Planned = {
    "allowed_token_ids": (None, []),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "prompt_logprobs": (None,),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
COMPLETION: Planned = {**BOTH_ROUTES, "best_of": (None, 1), "suffix": (None, "")}
CHAT: Planned = {
    **BOTH_ROUTES,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "echo": (None, False),
    "moderation": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "metadata": (None, {}),
}
CHAT_REASONS: Mapping[str, str] = dict.fromkeys(
    ("tools", "tool_choice", "functions", "function_call"), NO_TOOLS
)
MESSAGE: Planned = {
    "name": (None,),
    "refusal": (None,),
    "audio": (None,),
    "annotations": (None, []),
    "function_call": (None,),
    "tool_calls": (None, []),
    "tool_call_id": (None,),
}
MESSAGE_REASONS: Mapping[str, str] = dict.fromkeys(("function_call", "tool_calls", "tool_call_id"), NO_TOOLS)
STREAM_OPTIONS: Planned = {"continuous_usage_stats": (None, False), "include_obfuscation": (None, False)}
STRUCTURED_OUTPUTS: Planned = dict.fromkeys(
    ("json", "json_object", "choice", "grammar", "structural_tag"), (None,)
)
