// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "xla_ffi/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCpuExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCpuAttendExecute);

#if defined(JAXLOWBIT_WITH_CUDA)
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaTimesInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaTimesExecute);

namespace jaxlowbit {
// Number of executions of the CUDA handler in this process, not counting replays of a captured graph.
int64_t CudaExecuteCount();
}  // namespace jaxlowbit
#endif
