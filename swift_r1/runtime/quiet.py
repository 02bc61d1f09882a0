"""What libraries say on their own account."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Leaves our own log lines and other libraries' warnings; their progress bars and deprecations are noise."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("swift_r1").setLevel(logging.INFO)
    for name in ("DeepSpeed", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    # peft looks at the partitioned model, but saves the whole tensors that it is given.
    warnings.filterwarnings("ignore", message=r".*LoRA tensor\(s\) have invalid shape")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
