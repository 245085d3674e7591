// SPDX-License-Identifier: Apache-2.0

#include "cuda/check/replay.h"

#include <algorithm>
#include <vector>

#include "cuda/check/device_problem.h"

namespace jaxlowbit::check {

float TimeReplays(const std::function<void(cudaStream_t)>& enqueue, int warm_ups, int replays) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t begin, end;
  Check(cudaStreamCreate(&stream), "cudaStreamCreate");
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  enqueue(stream);
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  for (int replay = 0; replay < warm_ups; ++replay) {
    Check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
  }
  std::vector<float> times;
  for (int replay = 0; replay < replays; ++replay) {
    float milliseconds = 0;
    Check(cudaEventRecord(begin, stream), "cudaEventRecord");
    Check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    Check(cudaEventRecord(end, stream), "cudaEventRecord");
    Check(cudaEventSynchronize(end), "replay");
    Check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    times.push_back(milliseconds);
  }
  Check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  Check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  Check(cudaEventDestroy(begin), "cudaEventDestroy");
  Check(cudaEventDestroy(end), "cudaEventDestroy");
  Check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  std::nth_element(times.begin(), times.begin() + replays / 2, times.end());
  return 1e3f * times[replays / 2];
}

}  // namespace jaxlowbit::check
