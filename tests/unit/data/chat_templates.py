"""Chat templates of the kinds that models have, for tests."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{{ m['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

MARKED = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<end>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

# As Llama 2 and Mistral: a beginning of the sequence, and no generation prompt.
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
)

# As Qwen 3: the last answer has a block of thoughts, and thoughts of earlier answers are removed.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% set answer = m['content'].split('</think>')[-1] %}"
    "{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ answer }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# As DeepSeek-R1: the generation prompt starts the answer.
OPENED = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")

# Renders the system message before the last question.
LATE_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{% if loop.last or loop.index0 == "
    "messages|length - 2 %}{{ '[system]' }}{% endif %}{{ '[user]' + m['content'] }}"
    "{% else %}{{ '[answer]' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[answer]' }}{% endif %}"
)

ONLY_QUESTIONS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<user>' + m['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

TWO_TURNS = [
    {"role": "user", "content": "to be"},
    {"role": "assistant", "content": "or not"},
    {"role": "user", "content": "that is"},
    {"role": "assistant", "content": "the question"},
]
