// SPDX-License-Identifier: Apache-2.0
//
// Checks xla_ffi/plan_cache.h without XLA and without a GPU (tests/kernels/test_plan_cache.py): which calls share a
// plan. Prints "ok", or the first error and exits with 1.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/ways.h"
#include "xla_ffi/plan_cache.h"
#include "xla_ffi/record.h"

namespace jaxlowbit {
namespace {

using Random = std::mt19937_64;

void Expect(bool holds, const char* what, int64_t i) {
  if (holds) return;
  std::printf("%s (%ld)\n", what, static_cast<long>(i));
  std::exit(1);
}

struct Buffer {
  int64_t type;
  std::vector<int64_t> dims;
  char* data;
};

// A call, all of whose parts can be changed.
struct Call {
  int64_t device = 0, table = 0;
  std::vector<int64_t> products, steps;
  std::vector<float> numbers;
  float epsilon = 1e-5f;
  std::string epsilon_name = "epsilon";
  std::vector<Buffer> args, rets;

  // The number of values that Change can change.
  size_t size() const {
    size_t count = 4 + products.size() + steps.size() + numbers.size();
    for (const auto* buffers : {&args, &rets}) {
      for (const Buffer& buffer : *buffers) count += 1 + buffer.dims.size();
    }
    return count;
  }

  // Changes value `i`.
  void Change(size_t i, Random& random) {
    const auto step = static_cast<int64_t>(1 + random() % 1000);
    const auto among = [&](auto& values, auto by) {
      if (i < values.size()) values[i] += by;
      const bool found = i < values.size();
      i -= values.size();
      return found;
    };
    if (among(products, step) || among(steps, step) || among(numbers, 0.5f)) return;
    for (auto* buffers : {&args, &rets}) {
      for (Buffer& buffer : *buffers) {
        if (i-- == 0) return void(buffer.type = buffer.type == 11 ? 16 : 11);
        if (among(buffer.dims, step)) return;
      }
    }
    if (i == 0) device += step;
    if (i == 1) table += step;
    if (i == 2) epsilon *= 2;
    if (i == 3) epsilon_name = "epsiloo";
  }

  CallKey Key() const {
    std::vector<XLA_FFI_Buffer> buffers;
    for (const auto* list : {&args, &rets}) {
      for (const Buffer& buffer : *list) {
        buffers.push_back({sizeof(XLA_FFI_Buffer), nullptr,
                           static_cast<XLA_FFI_DataType>(buffer.type), buffer.data,
                           static_cast<int64_t>(buffer.dims.size()),
                           const_cast<int64_t*>(buffer.dims.data())});
      }
    }
    std::vector<void*> pointers;
    for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
    XLA_FFI_Args raw_args = {};
    raw_args.size = static_cast<int64_t>(args.size());
    raw_args.args = pointers.data();
    XLA_FFI_Rets raw_rets = {};
    raw_rets.size = static_cast<int64_t>(rets.size());
    raw_rets.rets = pointers.data() + args.size();
    const auto array = [](XLA_FFI_DataType type, const auto& values) {
      using Value = typename std::decay_t<decltype(values)>::value_type;
      return XLA_FFI_Array{type, values.size(), const_cast<Value*>(values.data())};
    };
    XLA_FFI_Array of_products = array(XLA_FFI_DataType_S64, products);
    XLA_FFI_Array of_steps = array(XLA_FFI_DataType_S64, steps);
    XLA_FFI_Array of_numbers = array(XLA_FFI_DataType_F32, numbers);
    XLA_FFI_Scalar scalar = {XLA_FFI_DataType_F32, const_cast<float*>(&epsilon)};
    XLA_FFI_ByteSpan names[] = {
        {epsilon_name.data(), epsilon_name.size()}, {"numbers", 7}, {"products", 8}, {"steps", 5}};
    XLA_FFI_ByteSpan* name_pointers[] = {&names[0], &names[1], &names[2], &names[3]};
    XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_ARRAY,
                                XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_ARRAY};
    void* values[] = {&scalar, &of_numbers, &of_products, &of_steps};
    XLA_FFI_Attrs attributes = {};
    attributes.size = 4;
    attributes.types = types;
    attributes.names = name_pointers;
    attributes.attrs = values;
    CallKey key;
    key.Read(ffi::RemainingArgs(&raw_args, 0), ffi::RemainingRets(&raw_rets, 0),
             RawAttributes{&attributes}, device, table);
    return key;
  }
};

// A product with random values in every field.
Call RandomCall(Random& random) {
  Call call;
  for (size_t i = 0; i < kProductNumbers; ++i) call.products.push_back(random() % 5000);
  for (size_t i = 0; i < kStepNumbers; ++i) call.steps.push_back(random() % 3);
  for (size_t i = 0; i < random() % 17; ++i) call.numbers.push_back(random() % 7);
  char* next = reinterpret_cast<char*>(uintptr_t{1} << 40);
  for (size_t i = 0; i < 3 + random() % 4; ++i) {
    Buffer buffer = {random() % 2 ? 11 : 16, {}, next += 1 << 20};
    for (size_t axis = 0; axis < random() % 5; ++axis) buffer.dims.push_back(random() % 100);
    (i < 2 ? call.rets : call.args).push_back(buffer);
  }
  return call;
}

using Plan = std::vector<int64_t>;  // the key that it was made for

std::shared_ptr<const Plan> PlanOf(const CallKey& key) {
  return std::make_shared<const Plan>(key.numbers);
}

void CheckKeys() {
  auto& cache = *new PlanCache<Plan>(30000);
  Random random(1);
  for (int i = 0; i < 10000; ++i) {
    const Call call = RandomCall(random);
    Call other = call, moved = call;
    other.Change(i < static_cast<int>(call.size()) ? i : random() % call.size(), random);
    for (Buffer& buffer : moved.args) buffer.data += 256;
    const CallKey key = call.Key(), other_key = other.Key();
    Expect(key.complete && key.numbers != other_key.numbers, "two calls have one key", i);
    Expect(cache.Find(key) == nullptr, "a plan exists before it is made", i);
    cache.Keep(key, {}, i % 2 == 0, PlanOf(key));
    Expect(cache.Find(other_key) == nullptr, "another call gets the plan", i);
    cache.Keep(other_key, {}, i % 2 == 0, PlanOf(other_key));
    Expect(*cache.Find(key) == key.numbers, "a call gets the plan of another", i);
    Expect(*cache.Find(other_key) == other_key.numbers, "a call gets the plan of another", i);
    Expect(cache.Find(moved.Key()) == cache.Find(key), "a plan depends on pointers", i);
    Expect((cache.Find(key, true) != nullptr) == (i % 2 == 0), "typical plans", i);
  }
}

// A plan is shared by pointers with the same answers only.
void CheckWays() {
  auto& cache = *new PlanCache<Plan>(10);
  Random random(2);
  const Call original = RandomCall(random);
  const auto ask = [](Ways* ways) {
    Plan answers;
    const Address lhs = {0, 0}, weights = {1, 0}, out = {2, 0};
    answers.push_back(ways->IsAligned(lhs));
    answers.push_back(ways->IsAligned({0, 24}));
    answers.push_back(ways->Overlap({out, 4096}, {lhs, 4096}));
    answers.push_back(ways->Overlap({out, 4096}, {weights, 64}));
    if (answers[2]) answers.push_back(ways->IsSame(out, lhs));
    return answers;
  };
  int made = 0;
  for (int i = 0; i < 4000; ++i) {
    Call call = original;
    std::swap(call.args, call.rets);
    call.args.resize(2, call.args.front()), call.rets.resize(1, call.args.front());
    char* const base = reinterpret_cast<char*>(uintptr_t{1} << 40);
    call.args[0].data = base + random() % 4 * 2;
    call.args[1].data = base + 100000 + random() % 2 * 8;
    call.rets[0].data = base + random() % 3 * 50000 + random() % 2 * 2;
    const CallKey key = call.Key();
    Ways ways(key.pointers.data());
    const Plan answers = ask(&ways);
    const Plan* found = cache.Find(key);
    if (found == nullptr) cache.Keep(key, ways.questions(), false, std::make_shared<Plan>(answers));
    made += found == nullptr;
    Expect(found == nullptr || *found == answers, "a plan for other pointers", i);
    Expect(HaveSameWays(ways.questions(), key.pointers.data()), "the answers are wrong", i);
  }
  Expect(made > 4 && cache.keys() == 1, "plans of one key", made);
  Ways typical(nullptr);
  const Plan answers = ask(&typical);
  Expect(answers == Plan{1, 0, 0, 0}, "typical pointers", 0);
}

void CheckFull() {
  auto& cache = *new PlanCache<Plan>(100);
  Random random(3);
  std::vector<CallKey> keys;
  for (int i = 0; i < 200; ++i) {
    keys.push_back(RandomCall(random).Key());
    cache.Keep(keys.back(), {}, false, PlanOf(keys.back()));
  }
  Expect(cache.keys() == 100, "the cache grows", cache.keys());
  for (int i = 0; i < 200; ++i) {
    Expect((cache.Find(keys[i]) != nullptr) == (i < 100), "a full cache", i);
  }
}

void CheckThreads() {
  auto& cache = *new PlanCache<Plan>(200);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&cache, thread] {
      Random random(thread);
      for (int i = 0; i < 3000; ++i) {
        Random same(random() % 300);
        const CallKey key = RandomCall(same).Key();
        const Plan* found = cache.Find(key);
        Expect(found == nullptr || *found == key.numbers, "a thread gets the plan of another call",
               i);
        if (found == nullptr) cache.Keep(key, {}, false, PlanOf(key));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Expect(cache.keys() == 200, "plans of several threads", cache.keys());
}

}  // namespace
}  // namespace jaxlowbit

int main() {
  jaxlowbit::CheckKeys();
  jaxlowbit::CheckWays();
  jaxlowbit::CheckFull();
  jaxlowbit::CheckThreads();
  std::puts("ok");
}
