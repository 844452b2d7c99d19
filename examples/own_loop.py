"""Train on the built-in scenes in a loop of your own, with lapclip's data, batches, towers and loss.

python examples/own_loop.py        # 300 steps
python examples/own_loop.py 20
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from lapclip import parts

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
device, why = parts.choose_device("auto")
shape, config = (
    parts.named_shape("mini"),
    parts.DataConfig(source="scenes", train_pairs=2000, tokenizer="bpe"),
)
data = parts.load_data(config, parts.View.of(shape))
captions = [caption for options in data.train.captions for caption in options]
tokenizer, _ = parts.choose_tokenizer(config, captions, data.alphabet, shape.context)
model = parts.CLIP(replace(shape, vocabulary=tokenizer.vocabulary), seed=0).to(device.torch)
plan = parts.BatchPlan(data.train, tokenizer, shape.context, batch_size=128, seed=0)
schedule = parts.TrainConfig(learning_rate=8e-4, warmup=0.1)
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)

for step, batch in enumerate(parts.prefetch(plan, 1, steps), 1):
    pixels, tokens, positives = (
        torch.from_numpy(part).to(device.torch)
        for part in (batch.pixels_BSSC, batch.tokens_BL, batch.positives_BB)
    )
    images, texts = (
        model.encode_image(parts.normalise(pixels, model.shape)),
        model.encode_text(tokens),
    )
    loss, logits = parts.contrastive_loss(images, texts, model.logit_scale.exp(), positives)
    optimizer.zero_grad()
    loss.backward()
    optimizer.param_groups[0]["lr"] = parts.learning_rate(step, steps, schedule)
    optimizer.step()
    model.hold_temperature()
    if step % 20 == 0 or step == steps:
        found = parts.batch_accuracy(logits, positives)[0].item()
        print(
            f"step {step} of {steps}: loss {loss.item():.3f}, {found:.0%} of the captions find their image"
        )

embedder = parts.Embedder(model.eval(), tokenizer, device)
scores = parts.retrieval(*embedder.encode_pairs(data.held_out))
print(
    f"held out: text to image R@1 {scores['t2i_r1']:.1%} (chance {scores['chance']:.1%}); on {device.kind}: {why}"
)
parts.save_model(embedder, Path("own-model"))
print('lapclip.load("own-model") loads it, and so does: lapclip eval own-model scenes')
