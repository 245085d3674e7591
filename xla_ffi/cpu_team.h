// SPDX-License-Identifier: Apache-2.0
//
// Threads that run the phases of a call together. The tasks of a phase may run in any order; a phase begins when all
// tasks of the previous one have ended.
//
// The calling thread runs tasks too, so a call completes even if the pool provides no thread. A thread that waits for
// the next phase spins, since phases take microseconds, and yields after a while. A thread that starts after the last
// phase finds no task and touches no buffer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "xla_ffi/ffi.h"

namespace jaxlowbit {

// Number of multiplications that cost as much as waking a thread.
inline constexpr int64_t kMultiplicationsPerThread = 1 << 18;

inline int64_t UsefulThreads(ffi::ThreadPool pool, int64_t multiplications) {
  return std::clamp<int64_t>(pool.num_threads(), 1,
                             1 + multiplications / kMultiplicationsPerThread);
}

class Team {
 public:
  // Called with the indices of the task and of its thread.
  using Task = std::function<void(int64_t task, int64_t thread)>;

  void AddPhase(int64_t tasks, Task run) {
    if (tasks > 0) state_->phases.emplace_back(tasks, std::move(run));
  }

  // Runs all phases on up to `threads` threads, including the calling one. Rethrows a task's exception.
  void Run(ffi::ThreadPool pool, int64_t threads) {
    int64_t most = 0;
    for (const Phase& phase : state_->phases) most = std::max(most, phase.tasks);
    for (int64_t thread = 1; thread < std::min(threads, most); ++thread) {
      pool.Schedule([state = state_, thread] { state->Work(thread); });
    }
    state_->Work(0);
    if (state_->thrown) std::rethrow_exception(state_->thrown);
  }

 private:
  struct Phase {
    Phase(int64_t tasks, Task run) : tasks(tasks), run(std::move(run)) {}

    int64_t tasks;
    Task run;
    std::atomic<int64_t> next{0}, done{0};
  };

  struct State {
    void Work(int64_t thread) {
      const int64_t count = static_cast<int64_t>(phases.size());
      for (int64_t i = 0; i < count; ++i) {
        Phase& phase = phases[i];
        int64_t task;
        while ((task = phase.next.fetch_add(1, std::memory_order_relaxed)) < phase.tasks) {
          try {
            phase.run(task, thread);
          } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex);
            thrown = std::current_exception();
          }
          if (phase.done.fetch_add(1, std::memory_order_acq_rel) + 1 == phase.tasks) {
            ended.store(i + 1, std::memory_order_release);
          }
        }
        for (int spins = 0; ended.load(std::memory_order_acquire) <= i; ++spins) {
          if (spins > kSpins) std::this_thread::yield();
          Pause();
        }
      }
    }

    static void Pause() {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }

    static constexpr int kSpins = 1000;
    std::deque<Phase> phases;
    std::atomic<int64_t> ended{0};  // phases
    std::mutex mutex;
    std::exception_ptr thrown;
  };

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace jaxlowbit
