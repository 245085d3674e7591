// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "xla_ffi/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCpuExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCpuBlockExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCpuAttendExecute);

#if defined(JAXLOWBIT_WITH_CUDA)
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaFusedInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaMatmulsInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaMlpInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaBlockInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaAttendInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaTimesInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaFusedExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaMatmulsExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaMlpExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaBlockExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaAttendExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxlowbitCudaTimesExecute);

#if defined(JAXLOWBIT_COUNT_EXECUTES)
namespace jaxlowbit {
int64_t CudaExecuteCount();  // calls of the execute handler in this process
}  // namespace jaxlowbit
#endif
#endif
