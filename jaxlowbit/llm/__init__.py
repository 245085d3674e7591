"""Language models: from a file to generated text.

It needs the extra `llm`; importing `jaxlowbit` imports none of it.
"""

from .._llm.adapters import LoRA as LoRA
from .._llm.bench import Speed as Speed
from .._llm.bench import bench as bench
from .._llm.config import Config as Config
from .._llm.config import RopeScaling as RopeScaling
from .._llm.decoder import Decoder as Decoder
from .._llm.generate import Generation as Generation
from .._llm.generate import Logprobs as Logprobs
from .._llm.generate import generate as generate
from .._llm.generate import stream as stream
from .._llm.language_model import LanguageModel as LanguageModel
from .._llm.language_model import export as export
from .._llm.language_model import init as init
from .._llm.language_model import load as load
from .._llm.language_model import save as save
from .._llm.language_model import shard as shard
from .._llm.lora import adapt as adapt
from .._llm.lora import merge_adapter as merge_adapter
from .._llm.lora import save_adapter as save_adapter
from .._llm.perplexity import Perplexity as Perplexity
from .._llm.perplexity import perplexity as perplexity
from .._llm.plan import plan as plan
from .._llm.session import Session as Session
