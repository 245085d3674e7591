// SPDX-License-Identifier: Apache-2.0

#include "cuda/ops/exchange.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace jaxlowbit {
namespace {

// The memory of a group for rows of one length, by rank. Never freed: captured graphs contain the addresses.
struct Group {
  int row_pieces = 0;
  int64_t inbox_bytes = 0;
  std::vector<ExchangeState*> states;
  std::vector<uint4*> inboxes;
  uint32_t* failure = nullptr;
};

// Devices and columns.
using Key = std::pair<std::vector<int>, int64_t>;

std::mutex
    lookup;  // of `groups`; held briefly, since kernels that wait for a peer need launches of that peer
std::mutex allocation;  // held by a thread that adds a group
std::map<Key, Group>& Groups() {
  static auto* groups = new std::map<Key, Group>;
  return *groups;
}

const Group* Find(const Key& key) {
  const std::lock_guard lock(lookup);
  const auto found = Groups().find(key);
  return found == Groups().end() ? nullptr : &found->second;
}

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

// Empties the memory of one rank: all bits of an inbox are 1 (exchange.cuh). Uses a separate stream, since other streams
// may contain kernels that wait for a peer.
cudaError_t Empty(const Group& group, size_t rank) {
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(group.inboxes[rank], 0xff, group.inbox_bytes, stream);
  if (error == cudaSuccess) {
    error = cudaMemsetAsync(group.states[rank], 0, sizeof(ExchangeState), stream);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  const cudaError_t destroyed = cudaStreamDestroy(stream);
  return error == cudaSuccess ? destroyed : error;
}

cudaError_t AllocateOn(int device, const std::vector<int>& devices, Group* group) {
  void *state = nullptr, *inbox = nullptr;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = EnablePeers(devices);
  if (error == cudaSuccess) error = cudaMalloc(&state, sizeof(ExchangeState));
  if (error == cudaSuccess) error = cudaMalloc(&inbox, group->inbox_bytes);
  group->states.push_back(static_cast<ExchangeState*>(state));
  group->inboxes.push_back(static_cast<uint4*>(inbox));
  return error == cudaSuccess ? Empty(*group, group->states.size() - 1) : error;
}

cudaError_t Allocate(const Key& key, Group* group) {
  const auto& [devices, columns] = key;
  group->row_pieces = RowPieces(columns);
  group->inbox_bytes = InboxBytes(static_cast<int>(devices.size()), group->row_pieces);
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  void* failure = nullptr;
  if (error == cudaSuccess) {
    error = cudaHostAlloc(&failure, sizeof(uint32_t), cudaHostAllocPortable | cudaHostAllocMapped);
  }
  group->failure = static_cast<uint32_t*>(failure);
  if (error == cudaSuccess) *group->failure = 0;
  for (size_t i = 0; error == cudaSuccess && i < devices.size(); ++i) {
    error = AllocateOn(devices[i], devices, group);
  }
  if (error != cudaSuccess) {
    for (ExchangeState* state : group->states) cudaFree(state);
    for (uint4* inbox : group->inboxes) cudaFree(inbox);
    cudaFreeHost(group->failure);
  }
  const cudaError_t restored = cudaSetDevice(current);
  return error == cudaSuccess ? restored : error;
}

uint32_t FailureOf(const Group& group) {
  return *static_cast<volatile const uint32_t*>(group.failure);
}

std::string Describe(const std::vector<int>& devices, const FailedWait& failed) {
  const auto number = [&](int rank) { return std::to_string(devices.at(rank)); };
  return "CUDA device " + number(failed.rank) + " waited in vain for rows of device " +
         number(failed.from) + ", so all " + std::to_string(devices.size()) +
         " devices of the model stopped and their results are NaN; look for an error of device " +
         number(failed.from) + ", then run the program again.";
}

// Empties the memory of all ranks when their devices are idle.
cudaError_t Reset(const Key& key, const Group& group) {
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  for (int device : key.first) {
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
  }
  for (size_t i = 0; i < key.first.size(); ++i) {
    if (error == cudaSuccess) error = cudaSetDevice(key.first[i]);
    if (error == cudaSuccess) error = Empty(group, i);
  }
  if (error == cudaSuccess) *group.failure = 0;
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
  const auto own = std::find(devices.begin(), devices.end(), device);
  if (own == devices.end() || devices.size() > kMaxExchangeParts) return cudaErrorInvalidDevice;
  const Key key = {devices, columns};
  const Group* group = Find(key);
  if (group == nullptr) {
    const std::lock_guard adding(allocation);
    group = Find(key);
    if (group == nullptr) {
      Group added;
      const cudaError_t error = Allocate(key, &added);
      if (error != cudaSuccess) return error;
      const std::lock_guard lock(lookup);
      group = &Groups().emplace(key, std::move(added)).first->second;
    }
  }
  exchange->parts = static_cast<int>(devices.size());
  exchange->rank = static_cast<int>(own - devices.begin());
  exchange->row_pieces = group->row_pieces;
  exchange->rounds = group->states[exchange->rank]->rounds[0];
  std::copy(group->states.begin(), group->states.end(), exchange->states);
  std::copy(group->inboxes.begin(), group->inboxes.end(), exchange->of);
  exchange->failure = group->failure;
  return cudaSuccess;
}

std::string ExchangeFailure() {
  const std::lock_guard lock(lookup);
  for (const auto& [key, group] : Groups()) {
    if (const uint32_t number = FailureOf(group); number != 0) {
      return Describe(key.first, FailedWait::Of(number));
    }
  }
  return "";
}

std::string TakeExchangeFailure() {
  std::string failure = ExchangeFailure();
  if (failure.empty()) return failure;
  const std::lock_guard adding(allocation);
  std::vector<std::pair<Key, Group>> failed;
  {
    const std::lock_guard lock(lookup);
    for (const auto& [key, group] : Groups()) {
      if (FailureOf(group) != 0) failed.emplace_back(key, group);
    }
  }
  for (const auto& [key, group] : failed) {
    const cudaError_t error = Reset(key, group);
    if (error == cudaSuccess) continue;
    cudaGetLastError();
    return failure + " Making the devices ready again failed with " + cudaGetErrorString(error) +
           "; restart the process.";
  }
  return failure;
}

}  // namespace jaxlowbit
