"""What the blocks of a random program are made of: inputs, forwards, backwards and steps."""

from differential.setting import Setting


class Lines(Setting):
    """Writes single lines, and the block that all others are variations of."""

    def x(self) -> str:
        self.n_inputs += 1
        if self.takes_tokens:
            return f"tokens(rank, {self.n_inputs})"
        dtype = ", dtype=torch.float64" if self.is_double else ""
        return f"data(rank, {self.n_inputs}, {self.rng.randint(1, 4)}, {self.width}{dtype})"

    def use(self) -> str:
        """Which layers run. Torch fails where a module of a group runs twice or not at all."""
        if self.groups or self.around == "reentrant" or not self.chance(0.3):
            return ""
        order = range(len(self.layers))
        chosen = self.rng.sample(order, self.rng.randint(1, len(self.layers)))
        # Torch reduces what ran twice in a reentrant checkpoint twice.
        is_counted_twice = self.program.counted and "reentrant" in self.layers
        may_repeat = not self.has_hooks and not is_counted_twice
        if may_repeat and self.chance(0.4):
            chosen.append(self.rng.choice(chosen))
            self.adds_many = True
        return f", use={tuple(chosen)}"

    def forward(self, use: str | None = None) -> str:
        keyword = "x=" if self.chance(0.1) else ""
        return f"model({keyword}{self.x()}{self.use() if use is None else use})"

    def finish(self) -> list[str]:
        """Optimizer step and clearing of gradients; at times nothing, so that they add up."""
        if self.chance(0.12):
            self.adds_many = True
            return []
        lines = ["scaled = halve_gradients(shards)"] if self.chance(0.1) else []
        if self.stays_unsharded:
            lines.append("reshard(model, fsdp)")
        if not self.ignores and self.chance(0.25):
            lines.append(self.clip())
        elif not self.ignores and self.chance(0.05):
            lines.append("norm = nn.utils.clip_grad_value_(model.parameters(), 0.1)")
        lines.append("optimizer.step()")
        lines.append(
            self.rng.choice(
                [
                    "optimizer.zero_grad()",
                    "optimizer.zero_grad(set_to_none=False)",
                    "model.zero_grad()",
                    "model.zero_grad(set_to_none=False)",
                ]
            )
        )
        return lines

    def clip(self) -> str:
        """A line that clips. Torch cannot take the largest of a rank's empty part."""
        choices = ["", "", ", norm_type=1", ", norm_type=3", ", foreach=True", ", foreach=False"]
        choices.append(", error_if_nonfinite=True")
        has_few_rows = not {"tiny", "convolved", "thin"}.isdisjoint(self.layers)
        has_rows = self.shard_size == 1 or (self.width >= 2 and not has_few_rows)
        if self.shard_size <= 2 and has_rows:
            choices.append(", norm_type=float('inf')")
        options = self.rng.choice(choices)
        if self.chance(0.2):
            options = options if "norm_type" in options else ""
            return (
                "grads = [p.grad for p in model.parameters() if p.grad is not None]\n"
                f"norm = nn.utils.get_total_norm(grads{options})\n"
                "nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)"
            )
        return f"norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5{options})"

    @property
    def stays_unsharded(self) -> bool:
        """Torch goes on with old weights where a unit is unsharded while its shards change: after a
        backward that does not reach a root's parameters, too."""
        is_reached = self.stem != "identity" or self.has_own
        may_pass_by = not is_reached and not {"tanh", "dropout"}.isdisjoint(self.layers)
        is_held = self.program.has("set_reshard_after_backward(False")
        return self.steps_others or is_held or may_pass_by

    def hook_lines(self) -> list[str]:
        return ["hooked = sorted(log, key=str)", "log.clear()"] if self.has_hooks else []

    def train(self) -> list[str]:
        return [
            f"out = {self.forward()}",
            *self.meanwhile(),
            self.backward(),
            *self.hook_lines(),
            *self.finish(),
        ]

    def meanwhile(self) -> list[str]:
        """Something between forward and backward."""
        if not self.chance(0.2):
            return []
        unit = self.unit()
        choices = [
            f"{unit}.unshard()",
            f"handle = {unit}.unshard(async_op=True)",
            "reshard(model, fsdp)",
            # Torch then unshards in another order; collectives differ by one. Torch leaves
            # units unsharded that it gathers for a replicated root's backward in vain.
            *(
                []
                if self.program.counted or self.program.has("replicate(")
                else [f"with torch.no_grad():\n    other = {self.forward()}"]
            ),
            "model.eval()",
            "model.train()",
            "for leaf in leaves(out):\n"
            "    leaf.requires_grad and leaf.register_hook(lambda grad: grad * 2)",
        ]
        return [self.rng.choice(choices)]

    def backward(self) -> str:
        """Of the whole output, or of its first tensor."""
        if self.output != "tensor" and self.chance(0.2):
            return "loss = backward(leaves(out)[:1])"
        return "loss = backward(out)"
