"""Chat templates in the style of well-known models, and their texts rendered by transformers.

The version of transformers is 5.24.
"""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Das Wetter für é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln <&'"}},
}
ASK = {"role": "user", "content": " Hi é <b> "}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "content": "12"}

# Qwen 3: tools as JSON, reasoning of the last turn only, a switch for thinking.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
    {%- if not thought and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function or call %}
        {{- '<tool_call>{"name": "' ~ call.name ~ '", "arguments": ' }}
        {{- call.arguments | tojson }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# SmolLM 3: generation blocks with local variables.
SMOLLM3 = """\
{# defaults #}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {% generation %}
        {%- set inner = message.content.lstrip() -%}
        {{ "<|im_start|>assistant\\n" + inner + "<|im_end|>\\n" }}
        {% endgeneration %}
        {{- inner is defined }}
    {%- else -%}
        {{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
    {%- endif -%}
{%- endfor -%}
{{- "<think>" if enable_thinking else "<think></think>" }}
"""
# Llama 3.1: a date, indented tools in the user's message, alternative names for tools.
LLAMA31 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}{% set date_string = strftime_now("") ~ "today" %}{% endif %}
{{- "<|header|>" + date_string + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if loop.first and tools is not none %}
        {%- for t in tools %}{{- t | tojson(indent=2) }}{{- "\\n\\n" }}{%- endfor %}
    {%- endif %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- call.name + "(" }}
        {%- for name, value in call.arguments | items %}{{ name + '="' + value + '"' }}{% endfor %}
        {{- ")<|eot_id|>" }}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
"""
# Gemma 3: the system message is part of the first turn; contents have parts.
GEMMA3 = """\
{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/...") }}
    {%- endif -%}
    {{ '<start_of_turn>' + ("model" if message['role'] == 'assistant' else message['role']) + '
' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ '<image>' if item['type'] == 'image' else item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""
# Mistral: tools with the last message of the user, calls and results with identifiers.
MISTRAL = """\
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == users[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' + val|tojson }}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {%- for call in message.tool_calls %}
            {%- set out = call.function|tojson %}
            {{- "[TOOL_CALLS] [" + out[:-1] + ', "id": "' + call.id + '"}]' + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
# Other features of templates.
OTHERS = """\
{%- for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{{- m | tojson(sort_keys=True, separators=(',', ':'), ensure_ascii=True) }}
{%- if loop.index > 1 %}{% break %}{% endif %}
{%- endfor %}
{{ documents | tojson }} {{ dict(a=1) | tojson }} {{ pad_token }}|{{ unk_token }}|{{ nothing }}
{{- unk_token is defined }}
"""

CASES = [
    (
        QWEN3,
        [ASK],
        {"enable_thinking": False},
        "<|im_start|>user\n Hi é <b> <|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    (
        QWEN3,
        [ASK, CALLING, RESULT],
        {"tools": [TOOL]},
        "<|im_start|>system\n"
        "<tools>\n"
        '{"type": "function", "function": {"name": "weather", "description": "Das Wetter '
        'für é", "parameters": {"type": "object", "properties": {"city": {"type": "string'
        '"}}}}}\n'
        "</tools><|im_end|>\n"
        "<|im_start|>user\n"
        " Hi é <b> <|im_end|>\n"
        "<|im_start|>assistant\n"
        "<think>\n"
        "\n"
        "</think>\n"
        "\n"
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln <&\'"}}</tool_call><|i'
        "m_end|>\n"
        "<|im_start|>tool\n"
        "12<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    (
        QWEN3,
        [ASK, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}],
        {},
        "<|im_start|>user\n"
        " Hi é <b> <|im_end|>\n"
        "<|im_start|>assistant\n"
        "<think>\n"
        "hm\n"
        "</think>\n"
        "\n"
        "yes<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    (
        QWEN3,
        [ASK, {"role": "assistant", "content": "yes", "reasoning": "hm"}],
        {},
        "<|im_start|>user\n"
        " Hi é <b> <|im_end|>\n"
        "<|im_start|>assistant\n"
        "<think>\n"
        "hm\n"
        "</think>\n"
        "\n"
        "yes<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    (
        SMOLLM3,
        [ASK, {"role": "assistant", "content": " ok"}],
        {},
        "<|im_start|>user\n"
        " Hi é <b> <|im_end|>\n"
        "<|im_start|>assistant\n"
        "ok<|im_end|>\n"
        "\n"
        "False<think>",
    ),
    (
        LLAMA31,
        [ASK, CALLING, RESULT],
        {"custom_tools": [TOOL]},
        "<s><|header|>today<|eot_id|>{\n"
        '  "type": "function",\n'
        '  "function": {\n'
        '    "name": "weather",\n'
        '    "description": "Das Wetter für é",\n'
        '    "parameters": {\n'
        '      "type": "object",\n'
        '      "properties": {\n'
        '        "city": {\n'
        '          "type": "string"\n'
        "        }\n"
        "      }\n"
        "    }\n"
        "  }\n"
        "}\n"
        "\n"
        'Hi é <b><|eot_id|>weather(city="Köln <&\'")<|eot_id|>12<|eot_id|>',
    ),
    (
        LLAMA31,
        [ASK, {"role": "assistant", "content": "ok", "tool_calls": None}],
        {},
        "<s><|header|>today<|eot_id|>Hi é <b><|eot_id|>ok<|eot_id|>",
    ),
    (
        GEMMA3,
        [ASK, {"role": "assistant", "content": " ok "}, ASK],
        {},
        "<s><start_of_turn>user\n"
        "Hi é <b><end_of_turn>\n"
        "<start_of_turn>model\n"
        "ok<end_of_turn>\n"
        "<start_of_turn>user\n"
        "Hi é <b><end_of_turn>\n"
        "<start_of_turn>model\n",
    ),
    (
        GEMMA3,
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " two "}]}],
        {},
        "<s><start_of_turn>user\n<image>two<end_of_turn>\n<start_of_turn>model\n",
    ),
    (
        MISTRAL,
        [ASK, CALLING, RESULT, ASK],
        {"tools": [TOOL]},
        '<s>[AVAILABLE_TOOLS] ["name": "weather", "description": "Das Wetter für é", "par'
        'ameters": {"type": "object", "properties": {"city": {"type": "string"}}}][/AVAIL'
        'ABLE_TOOLS][INST]  Hi é <b> [/INST][TOOL_CALLS] [{"name": "weather", "arguments"'
        ': {"city": "Köln <&\'"}, "id": "abcdef123"}]</s>[TOOL_RESULTS] {"content": 12}[/T'
        'OOL_RESULTS][AVAILABLE_TOOLS] ["name": "weather", "description": "Das Wetter für'
        ' é", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}'
        "}][/AVAILABLE_TOOLS][INST]  Hi é <b> [/INST]",
    ),
    (
        OTHERS,
        [RESULT, ASK, ASK, ASK],
        {"documents": [{"title": "é"}]},
        '{"content":" Hi \\u00e9 <b> ","role":"user"}[{"title": "é"}] {"a": 1} <pad>||False',
    ),
]
