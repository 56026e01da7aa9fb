// Counts the bytes that torch's CPU allocator has handed out, in whichever thread.
//
// Memory comes from the allocator that was there before, at the same addresses: only the deleter of a block becomes
// ours, and a table holds the size of each. Blocks from before `zerobench_install` pass uncounted. There is no way
// back: blocks that are alive need our deleter until they die.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace {

// Block -> size, by open addressing: std::unordered_map asks malloc for a node each time, which can be measured.
class Sizes {
 public:
  void put(void* block, int64_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (2 * ++used_ > slots_.size()) {
      grow();
    }
    slots_[place_of(block)] = {block, size};
  }

  // The size of the block, which is forgotten; 0 for an unknown one.
  int64_t take(void* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t at = place_of(block);
    if (slots_[at].block == nullptr) {
      return 0;
    }
    const int64_t size = slots_[at].size;
    --used_;
    // what was put behind because of this slot moves up, so that no search ends too early
    for (size_t next = after(at);; next = after(next)) {
      if (slots_[next].block == nullptr) {
        break;
      }
      const size_t home = home_of(slots_[next].block);
      if (((next - home) & mask()) >= ((next - at) & mask())) {
        slots_[at] = slots_[next];
        at = next;
      }
    }
    slots_[at] = {};
    return size;
  }

 private:
  struct Slot {
    void* block = nullptr;
    int64_t size = 0;
  };

  size_t mask() const {
    return slots_.size() - 1;
  }
  size_t after(size_t at) const {
    return (at + 1) & mask();
  }
  size_t home_of(void* block) const {
    return (reinterpret_cast<uintptr_t>(block) >> 6) * 0x9E3779B97F4A7C15ULL >> 20 & mask();
  }
  size_t place_of(void* block) const {
    size_t at = home_of(block);
    while (slots_[at].block != nullptr && slots_[at].block != block) {
      at = after(at);
    }
    return at;
  }
  void grow() {
    std::vector<Slot> before(2 * slots_.size());
    before.swap(slots_);
    for (const Slot& slot : before) {
      if (slot.block != nullptr) {
        slots_[place_of(slot.block)] = slot;
      }
    }
  }

  std::mutex mutex_;
  std::vector<Slot> slots_ = std::vector<Slot>(1 << 12);
  size_t used_ = 0;
};

auto* const sizes = new Sizes;  // never destroyed: blocks may die after static destructors have run
std::atomic<int64_t> live{0};
std::atomic<int64_t> peak{0};
c10::Allocator* before = nullptr;
c10::DeleterFnPtr free_before = nullptr;

void count(void* block, int64_t size) {
  sizes->put(block, size);
  const int64_t now = live.fetch_add(size) + size;
  int64_t most = peak.load();
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
}

void free_counted(void* block) {
  live.fetch_sub(sizes->take(block));
  free_before(block);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr block = before->allocate(size);
    void* const context = block.get_context();
    if (context != nullptr && block.compare_exchange_deleter(free_before, &free_counted)) {
      count(context, static_cast<int64_t>(size));
    }
    return block;
  }

  bool is_simple_data_ptr(const c10::DataPtr& block) const override {
    return before->is_simple_data_ptr(block);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_counted;
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    before->copy_data(to, from, size);
  }
};

}  // namespace

// Starts to count, once in a process; 0 where the blocks of the allocator that is there have no plain deleter.
extern "C" int zerobench_install() {
  if (before != nullptr) {
    return 1;
  }
  c10::Allocator* const found = c10::GetCPUAllocator();
  if (found == nullptr || found->raw_deleter() == nullptr) {
    return 0;
  }
  before = found;
  free_before = found->raw_deleter();
  c10::SetCPUAllocator(new Counting, 255);
  return 1;
}

extern "C" int64_t zerobench_live() {
  return live.load();
}

// The most that was alive since the last call.
extern "C" int64_t zerobench_take_peak() {
  return peak.exchange(live.load());
}
