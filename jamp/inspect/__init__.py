"""Looking at precision: what runs in which dtype, how far results move, and where infinities come from."""

from jamp.inspect._check_numerics import check_numerics as check_numerics
from jamp.inspect._compare import Comparison as Comparison
from jamp.inspect._compare import Difference as Difference
from jamp.inspect._compare import compare as compare
from jamp.inspect._error_sources import ErrorSource as ErrorSource
from jamp.inspect._error_sources import ErrorSources as ErrorSources
from jamp.inspect._error_sources import error_sources as error_sources
from jamp.inspect._first_nonfinite import first_nonfinite as first_nonfinite
from jamp.inspect._flops import Matmul as Matmul
from jamp.inspect._flops import casts as casts
from jamp.inspect._flops import half_share as half_share
from jamp.inspect._flops import matmuls as matmuls
from jamp.inspect._gradient_histogram import GradientHistogram as GradientHistogram
from jamp.inspect._gradient_histogram import gradient_histogram as gradient_histogram
from jamp.inspect._nonfinite import NonFinite as NonFinite
from jamp.inspect._numerics import Numerics as Numerics
from jamp.inspect._operations import Operation as Operation
from jamp.inspect._report import Report as Report
from jamp.inspect._report import report as report
from jamp.inspect._residuals import COPY as COPY
from jamp.inspect._residuals import Residual as Residual
from jamp.inspect._residuals import bytes_by_dtype as bytes_by_dtype
from jamp.inspect._residuals import residuals as residuals
from jamp.inspect._tune import tune as tune
from jamp.inspect._verdict import Verification as Verification
from jamp.inspect._verify import verify as verify
