// SPDX-License-Identifier: Apache-2.0

#include "cuda/timing.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>

#include "cuda/launch.h"

namespace jaxlowbit {
namespace {

// Destroys a CUDA object with its owner.
template <auto kDestroy>
struct Destroy {
  template <typename T>
  void operator()(T* object) const {
    kDestroy(object);
  }
};

template <typename Handle, auto kDestroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<kDestroy>>;
using Stream = Owned<cudaStream_t, cudaStreamDestroy>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;
using Graph = Owned<cudaGraph_t, cudaGraphDestroy>;
using Executable = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;

// Gives `owner` the object that `create(&handle)` makes.
template <typename OwnedHandle, typename Create>
cudaError_t Make(OwnedHandle* owner, Create create) {
  typename OwnedHandle::pointer handle = nullptr;
  const cudaError_t error = create(&handle);
  if (error == cudaSuccess) owner->reset(handle);
  return error;
}

cudaError_t Capture(const QuantizedMatmul& problem, const std::vector<Buffers>& calls,
                    const Choice& choice, int device, cudaStream_t stream, Executable* executable) {
  cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (error != cudaSuccess) return error;
  QuantizedMatmul call = problem;
  for (size_t i = 0; i < calls.size() && error == cudaSuccess; ++i) {
    call.pdl = problem.pdl && i > 0;
    error = LaunchChoice(call, calls[i], choice, device, stream);
  }
  Graph graph;
  const cudaError_t ended =
      Make(&graph, [&](cudaGraph_t* handle) { return cudaStreamEndCapture(stream, handle); });
  if (error == cudaSuccess) error = ended;
  if (error != cudaSuccess) return error;
  return Make(executable, [&](cudaGraphExec_t* handle) {
    return cudaGraphInstantiate(handle, graph.get(), 0);
  });
}

cudaError_t Replay(cudaGraphExec_t graph, cudaEvent_t begin, cudaEvent_t end, cudaStream_t stream,
                   float* milliseconds) {
  cudaError_t error = cudaEventRecord(begin, stream);
  if (error == cudaSuccess) error = cudaGraphLaunch(graph, stream);
  if (error == cudaSuccess) error = cudaEventRecord(end, stream);
  if (error == cudaSuccess) error = cudaEventSynchronize(end);
  if (error == cudaSuccess) error = cudaEventElapsedTime(milliseconds, begin, end);
  return error;
}

}  // namespace

cudaError_t TimeChoices(const QuantizedMatmul& problem, const std::vector<Buffers>& calls,
                        const std::vector<Choice>& choices, int device,
                        std::vector<float>* microseconds, const TimingEffort& effort) {
  cudaError_t error = LoadChoices(problem, choices, device);
  if (error != cudaSuccess) return error;
  Stream stream;
  Event begin, end;
  error = Make(&stream, [](cudaStream_t* handle) {
    return cudaStreamCreateWithFlags(handle, cudaStreamNonBlocking);
  });
  if (error == cudaSuccess) error = Make(&begin, [](cudaEvent_t* e) { return cudaEventCreate(e); });
  if (error == cudaSuccess) error = Make(&end, [](cudaEvent_t* e) { return cudaEventCreate(e); });
  std::vector<Executable> graphs(choices.size());
  for (size_t i = 0; i < choices.size() && error == cudaSuccess; ++i) {
    error = Capture(problem, calls, choices[i], device, stream.get(), &graphs[i]);
  }
  std::vector<std::vector<float>> samples(choices.size());
  float warm = 0;
  while (warm < effort.warm_up_milliseconds && error == cudaSuccess) {
    for (size_t i = 0; i < choices.size() && error == cudaSuccess; ++i) {
      float milliseconds = 0;
      error = Replay(graphs[i].get(), begin.get(), end.get(), stream.get(), &milliseconds);
      warm += milliseconds;
    }
  }
  float spent = 0;
  for (int replay = 0; replay < effort.replays && error == cudaSuccess; ++replay) {
    if (replay >= effort.min_replays && spent >= effort.max_milliseconds) break;
    for (size_t i = 0; i < choices.size() && error == cudaSuccess; ++i) {
      float milliseconds = 0;
      error = Replay(graphs[i].get(), begin.get(), end.get(), stream.get(), &milliseconds);
      spent += milliseconds;
      samples[i].push_back(1e3f * milliseconds / static_cast<float>(calls.size()));
    }
  }
  if (error != cudaSuccess) return error;
  microseconds->clear();
  for (std::vector<float>& times : samples) {
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    microseconds->push_back(*middle);
  }
  return cudaSuccess;
}

}  // namespace jaxlowbit
