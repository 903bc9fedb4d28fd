#!/usr/bin/env bash
# Two soft caps that transformers documents for Gemma3TextConfig do nothing, without a word. Gemma3ForCausalLM caps its
# logits by final_logit_softcapping; Gemma3ForConditionalGeneration with the same text weights, text and cap does not, and
# AutoModelForCausalLM builds the latter from a config.json with model_type gemma3. PaliGemma, Gemma 3n and Gemma 4 do cap
# there. Neither class caps its attention scores by attn_logit_softcapping, as Gemma 2 does by the same key.
#
# Version: transformers 5.24.0, torch 2.13.0. Seen with a cap of 1: largest logits 1.0 and 35.4, the former the tanh of
# the latter; with a cap of 0.001 on attention scores: the same logits to the bit as without. The published Gemma 3
# models hide it: they have no caps. Whoever pretrains with a cap and converts to Gemma 3 gets another loss in the class
# for pictures and text; a cap on attention scores cannot be converted to Gemma 3 at all.
#
#     bash findings/gemma3_soft_caps.sh      exit code 1 if the behaviour has changed
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0 numpy
cd "$folder"
TRANSFORMERS_VERBOSITY=warning "$folder/environment/bin/python" - <<'PYTHON'
import sys

import torch
import transformers

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
PICTURES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
ids = torch.tensor([[2, 5, 6, 7, 8, 9]])
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
torch.set_grad_enabled(False)
torch.manual_seed(0)

text_config = transformers.Gemma3TextConfig(**TEXT, final_logit_softcapping=1.0)
causal = transformers.Gemma3ForCausalLM(text_config).eval()
causal.model.embed_tokens.weight.mul_(50)  # tied to the output layer: logits well above the cap
config = transformers.Gemma3Config(text_config=text_config, vision_config=PICTURES, mm_tokens_per_image=4)
conditional = transformers.AutoModelForCausalLM.from_config(config).eval()
conditional.model.language_model.load_state_dict(causal.model.state_dict())
conditional.lm_head.load_state_dict(causal.lm_head.state_dict())
capped, raw = causal(ids).logits, conditional(ids).logits
for model, logits in ((causal, capped), (conditional, raw)):
    cap = model.config.get_text_config().final_logit_softcapping
    print(f"{type(model).__name__}, final_logit_softcapping {cap}: largest logit {logits.abs().max():.1f}")
print(f"tanh of the latter's logits less the former's: {(raw.tanh() - capped).abs().max():.1e}")

change = {}
for family in ("Gemma2", "Gemma3"):
    logits = []
    for cap in (None, 0.001):
        config_class = getattr(transformers, f"{family}Config" if family == "Gemma2" else f"{family}TextConfig")
        config = config_class(**TEXT, attn_logit_softcapping=cap, attn_implementation="eager")
        torch.manual_seed(0)
        logits.append(getattr(transformers, f"{family}ForCausalLM")(config).eval()(ids).logits)
    change[family] = (logits[1] - logits[0]).abs().max().item()
    print(f"{family}ForCausalLM: attn_logit_softcapping 0.001 changes a logit by up to {change[family]:.1e}")
if type(conditional).__name__ != "Gemma3ForConditionalGeneration" or raw.abs().max() <= 1 or change["Gemma3"] != 0:
    sys.exit("Gemma 3 treats its soft caps otherwise now")
if capped.abs().max() > 1 or change["Gemma2"] == 0:
    sys.exit("the models that capped do so no more")
PYTHON
