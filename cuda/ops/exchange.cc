// SPDX-License-Identifier: Apache-2.0

#include "cuda/ops/exchange.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/limits.h"

namespace jaxlowbit {
namespace {

// Buffers by rank. Never freed: captured graphs contain the addresses.
struct Memory {
  std::vector<uint4*> inboxes;
  std::vector<uint32_t*> rounds;
};

cudaError_t EnablePeers(const std::vector<int>& devices) {
  for (int peer : devices) {
    int current = 0;
    cudaError_t error = cudaGetDevice(&current);
    if (error == cudaSuccess && peer != current) error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
      error = cudaSuccess;
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Zeros mean "nothing received", since rounds start at 1.
cudaError_t AllocateZeros(int64_t bytes, void** memory) {
  const cudaError_t error = cudaMalloc(memory, bytes);
  return error == cudaSuccess ? cudaMemset(*memory, 0, bytes) : error;
}

cudaError_t Allocate(const std::vector<int>& devices, int64_t columns, Memory* memory) {
  const auto parts = static_cast<int64_t>(devices.size());
  const int64_t inbox_bytes = 2 * kMaxExchangeRows * parts * columns * int64_t{sizeof(uint64_t)};
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  for (int device : devices) {
    void *inbox = nullptr, *rounds = nullptr;
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error == cudaSuccess) error = EnablePeers(devices);
    if (error == cudaSuccess) error = AllocateZeros(inbox_bytes, &inbox);
    if (error == cudaSuccess) error = AllocateZeros(kMaxExchangeRows * sizeof(uint32_t), &rounds);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    memory->inboxes.push_back(static_cast<uint4*>(inbox));
    memory->rounds.push_back(static_cast<uint32_t*>(rounds));
  }
  for (size_t i = 0; error != cudaSuccess && i < memory->inboxes.size(); ++i) {
    cudaFree(memory->inboxes[i]);
    cudaFree(memory->rounds[i]);
  }
  const cudaError_t restored = cudaSetDevice(current);
  return error == cudaSuccess ? restored : error;
}

}  // namespace

bool CanExchange(const std::vector<int>& devices) {
  for (int a : devices) {
    for (int b : devices) {
      int can = a == b;
      if (a != b && cudaDeviceCanAccessPeer(&can, a, b) != cudaSuccess) cudaGetLastError();
      if (!can) return false;
    }
  }
  return devices.size() <= kMaxExchangeParts;
}

cudaError_t FindExchange(const std::vector<int>& devices, int device, int64_t columns,
                         Exchange* exchange) {
  static std::mutex mutex;
  static std::map<std::pair<std::vector<int>, int64_t>, Memory> groups;
  const auto own = std::find(devices.begin(), devices.end(), device);
  if (own == devices.end() || devices.size() > kMaxExchangeParts) return cudaErrorInvalidDevice;
  const std::lock_guard lock(mutex);
  auto found = groups.find({devices, columns});
  if (found == groups.end()) {
    Memory memory;
    const cudaError_t error = Allocate(devices, columns, &memory);
    if (error != cudaSuccess) return error;
    found = groups.emplace(std::pair{devices, columns}, std::move(memory)).first;
  }
  exchange->parts = static_cast<int>(devices.size());
  exchange->rank = static_cast<int>(own - devices.begin());
  exchange->columns = columns;
  std::copy(found->second.inboxes.begin(), found->second.inboxes.end(), exchange->inboxes);
  exchange->rounds = found->second.rounds[exchange->rank];
  return cudaSuccess;
}

}  // namespace jaxlowbit
