#include "src/cuda/registrations.h"

#include <algorithm>
#include <limits>
#include <mutex>

namespace rekindle::cuda {

namespace {

std::uintptr_t number(const std::byte* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

}  // namespace

void Registrations::add(std::span<const std::byte> memory) {
  const std::unique_lock lock(mutex_);
  ends_[number(memory.data())] = number(memory.data()) + memory.size();
}

void Registrations::remove(std::span<const std::byte> memory) {
  const std::unique_lock lock(mutex_);
  ends_.erase(number(memory.data()));
}

std::uintptr_t Registrations::same_until(std::uintptr_t at) const {
  const auto next = ends_.upper_bound(at);
  if (next != ends_.begin()) {
    if (const auto own = std::prev(next); at < own->second) return own->second;
  }
  return next == ends_.end() ? std::numeric_limits<std::uintptr_t>::max() : next->first;
}

void Registrations::cut_run(bucket::Upload run, std::vector<bucket::Upload>& out) const {
  while (run.run_bytes > 0) {
    const std::uint64_t bytes =
        std::min<std::uint64_t>(run.run_bytes, same_until(number(run.from)) - number(run.from));
    out.push_back({.from = run.from, .to = run.to, .run_bytes = bytes});
    run.from += bytes;
    run.to += bytes;
    run.run_bytes -= bytes;
  }
}

void Registrations::cut_rows(bucket::Upload copy, std::vector<bucket::Upload>& out) const {
  while (copy.rows > 0) {
    const std::uint64_t same = same_until(number(copy.from)) - number(copy.from);
    // The rows before the border go together; a row that crosses it is cut.
    std::uint64_t rows = 0;
    if (same >= copy.run_bytes) {
      rows = copy.from_stride == 0
                 ? copy.rows
                 : std::min(copy.rows, 1 + (same - copy.run_bytes) / copy.from_stride);
      bucket::Upload whole = copy;
      whole.rows = rows;
      out.push_back(whole);
    } else {
      rows = 1;
      cut_run(copy, out);
    }
    copy.from += rows * copy.from_stride;
    copy.to += rows * copy.to_stride;
    copy.rows -= rows;
  }
}

void Registrations::cut_one(const bucket::Upload& copy, std::vector<bucket::Upload>& out) const {
  if (copy.run_bytes == 0 || copy.rows == 0) return;
  const bool one_run =
      copy.rows == 1 || (copy.from_stride == copy.run_bytes && copy.to_stride == copy.run_bytes);
  if (one_run) {
    cut_run({.from = copy.from, .to = copy.to, .run_bytes = copy.rows * copy.run_bytes}, out);
  } else {
    cut_rows(copy, out);
  }
}

void Registrations::cut(std::span<const bucket::Upload> copies,
                        std::vector<bucket::Upload>& out) const {
  const std::shared_lock lock(mutex_);
  for (const bucket::Upload& copy : copies) cut_one(copy, out);
}

void Registrations::cut(std::span<const bucket::Download> copies,
                        std::vector<bucket::Download>& out) const {
  const std::shared_lock lock(mutex_);
  // The same copies in the other direction: the borders are equal.
  std::vector<bucket::Upload> turned;
  for (const bucket::Download& copy : copies) {
    cut_one({.from = copy.to,
             .to = copy.from,
             .run_bytes = copy.bytes,
             .rows = copy.rows,
             .from_stride = copy.to_stride,
             .to_stride = copy.from_stride},
            turned);
  }
  for (const bucket::Upload& copy : turned) {
    out.push_back({.from = copy.to,
                   .to = const_cast<std::byte*>(copy.from),
                   .bytes = copy.run_bytes,
                   .rows = copy.rows,
                   .from_stride = copy.to_stride,
                   .to_stride = copy.from_stride});
  }
}

}  // namespace rekindle::cuda
