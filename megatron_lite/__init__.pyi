from megatron_lite.notebook.looking import Model as Model
from megatron_lite.notebook.looking import load as load
from megatron_lite.notebook.training import Result as Result
from megatron_lite.notebook.training import train as train

__version__: str
