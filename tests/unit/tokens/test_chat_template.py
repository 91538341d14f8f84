"""Chat templates render as transformers renders them, and cannot hurt the process."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.harness.small_tokenizers import byte_level
from tokens.chat_template import ChatTemplate
from tokens.errors import ChatTemplateError, ReservedNameError, TokenizerError

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
# The shape of Qwen3's: namespace, reversed slice, break, string methods, tojson, a generation
# block.
QWEN_3 = """
{%- if tools %}
    {{- '# Tools ' + tools | tojson }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {% generation %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' }}
        {%- if loop.index0 == ns.last_query_index %} last {% endif %}
    {%- endif %}
{%- endfor %}
{{- dict(a=1) | tojson(indent=2) }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}no{%- endif %}
{%- endif %}
"""
DATED = (
    "{{ bos_token }}Today is {{ strftime_now('%Y') }}.\n{{ messages | tojson }}\n  {# gone #}\nx"
)

CHATS = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be brief & <kind> 'quoted' \u00e9"},
        {"role": "user", "content": "  What is 2 + 2?\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour."},
        {"role": "user", "content": "Thank you"},
    ],
)


def _save(folder: Path, template: object, **config: object) -> Path:
    byte_level()._backend.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("template", [CHATML, LLAMA_2, QWEN_3, DATED])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompted", [True, False])
def test_equals_transformers(
    template: str, chat: list[dict[str, str]], prompted: bool, tmp_path: Path
) -> None:
    folder = _save(tmp_path, template, bos_token="<|user|>", eos_token="<|end|>")
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompted)
    ours = ChatTemplate.find(folder)
    assert ours is not None
    assert ours.render(chat, add_generation_prompt=prompted) == expected


def test_the_file_wins_over_the_config(tmp_path: Path) -> None:
    _save(tmp_path, "from config")
    (tmp_path / "chat_template.jinja").write_text("from file {{ bos_token }}|")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<b>"}}')
    template = ChatTemplate.find(tmp_path)
    assert template is not None and template.render(CHATS[0]) == "from file <b>|"


def test_of_several_templates_the_default_one(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    template = ChatTemplate.find(_save(tmp_path, named))
    assert template is not None and template.render(CHATS[0]) == "d"


def test_a_checkpoint_may_have_none(tmp_path: Path) -> None:
    assert ChatTemplate.find(tmp_path) is None
    assert ChatTemplate.find(_save(tmp_path, None)) is None


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        ChatTemplate.find(tmp_path)


def test_a_broken_template_is_an_error() -> None:
    with pytest.raises(ChatTemplateError, match="broken"):
        ChatTemplate("{% for %}", special_tokens={})


def test_the_template_may_refuse() -> None:
    template = ChatTemplate(LLAMA_2, special_tokens={"bos_token": "", "eos_token": ""})
    with pytest.raises(ChatTemplateError, match="must alternate"):
        template.render([CHATS[0][0], CHATS[0][0]])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 100000000000 }}",
        "{{ [0] * 100000000000 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% for i in range(99999) %}{{ 'x' * 900 }}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(99) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ none + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].role }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_hostile_or_faulty_template_is_stopped(source: str) -> None:
    template = ChatTemplate(source, special_tokens={}, max_output_chars=100_000)
    with pytest.raises(ChatTemplateError, match="chat template"):
        template.render(CHATS[0])


def test_the_clock_is_given() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", special_tokens={}, now=lambda: datetime(2024, 2, 29)
    )
    assert template.render(CHATS[0]) == "29 Feb 2024"


def test_tools_and_arguments_are_variables_of_the_template() -> None:
    template = ChatTemplate(
        "{% for t in tools or () %}{{ t.function.name }} {% endfor %}{{ mood or 'calm' }}"
        "{{ '' if tools is none else '!' }}",
        special_tokens={"bos_token": "<s>"},
    )
    assert template.takes_tools
    assert template.render([]) == "calm"
    tool = {"type": "function", "function": {"name": "look"}}
    assert template.render([], tools=[tool], arguments={"mood": "glad"}) == "look glad!"
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        with pytest.raises(ReservedNameError, match=f"'{name}' is not the request's"):
            template.render([], arguments={name: "x"})
    assert not ChatTemplate("{{ messages }}", special_tokens={}).takes_tools
