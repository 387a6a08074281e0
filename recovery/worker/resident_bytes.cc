#include "recovery/worker/resident_bytes.h"

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "recovery/rpc/convert.h"
#include "src/async/offload.h"

namespace rekindle::worker {

namespace {

// For a check. The device process ends it earlier, unless it hangs itself.
constexpr std::chrono::milliseconds kDevicePatience{60'000};
// For a MiB. Longer than the device process's own deadline.
constexpr std::chrono::milliseconds kCopyPatience{10'000};

// One answer of the device process.
template <typename T>
struct DeviceAnswer {
  explicit DeviceAnswer(const boost::asio::any_io_executor& executor) : done(executor) {}
  async::Notifier done;
  std::optional<Result<T>> result;
};

template <typename T>
async::Task<Result<T>> wait_for(std::shared_ptr<DeviceAnswer<T>> answer,
                                std::chrono::milliseconds patience) {
  const TimePoint give_up = steady_now() + patience;
  while (!answer->result && steady_now() < give_up && !co_await async::is_cancelled()) {
    co_await answer->done.wait_until(give_up);
  }
  if (answer->result) co_return std::move(*answer->result);
  co_return fail(ErrorCode::kTimeout,
                 "the device process has not answered about a resident copy for {} s",
                 std::chrono::duration_cast<std::chrono::seconds>(patience).count());
}

template <typename T>
std::function<void(Result<T>)> taker_of(const std::shared_ptr<DeviceAnswer<T>>& answer) {
  return [answer](Result<T> result) {
    answer->result = std::move(result);
    answer->done.notify();
  };
}

std::string place_of(const OpenResident& resident, std::size_t tile) {
  return fmt::format("MiB {} of {}", tile, resident.record().device());
}

}  // namespace

bool may_work_later(const Error& why) {
  switch (why.code()) {
    case ErrorCode::kUnavailable:
    case ErrorCode::kPeerLost:
    case ErrorCode::kTimeout:
    case ErrorCode::kInternal:
    case ErrorCode::kExhausted:
      return true;
    default:
      return false;
  }
}

async::Task<Result<std::vector<Digest>>> ResidentBytes::digests(
    std::string device, std::vector<bucket::BlockFile> blocks) {
  const auto answer = std::make_shared<DeviceAnswer<std::vector<Digest>>>(executor_);
  devices_.check_blocks(device, std::move(blocks), taker_of(answer));
  auto waiting = wait_for(answer, kDevicePatience);
  co_return co_await std::move(waiting);
}

async::Task<Result<std::string>> ResidentBytes::copy(std::string device, bucket::BlockFile block,
                                                     std::string data) {
  const auto answer = std::make_shared<DeviceAnswer<std::string>>(executor_);
  devices_.copy_block(device, std::move(block), std::move(data), taker_of(answer));
  auto waiting = wait_for(answer, kCopyPatience);
  co_return co_await std::move(waiting);
}

async::Task<Result<std::vector<std::size_t>>> ResidentBytes::compare(OpenResidentPtr resident) {
  CO_TRY(auto files, resident->whole());
  auto digesting = digests(resident->record().device(), std::move(files));
  CO_TRY(const auto found, co_await std::move(digesting));
  if (found.size() != resident->tiles()) {
    co_return fail(ErrorCode::kCorrupt, "a resident copy has other blocks than at its seal");
  }
  co_return resident->differing(0, found);
}

async::Task<Result<std::vector<std::size_t>>> ResidentBytes::compare(OpenResidentPtr resident,
                                                                     std::size_t first,
                                                                     std::size_t count) {
  std::vector<bucket::BlockFile> files;
  CO_TRY(auto part, resident->part(first, count));
  files.push_back(std::move(part));
  auto digesting = digests(resident->record().device(), std::move(files));
  CO_TRY(const auto found, co_await std::move(digesting));
  if (found.size() != count) {
    co_return fail(ErrorCode::kCorrupt, "{} digests came for {} MiB of a resident copy",
                   found.size(), count);
  }
  co_return resident->differing(first, found);
}

// Tries each copy of the version that this host has: together or alone they may be parts only.
async::Task<Result<std::string>> ResidentBytes::right_bytes(OpenResidentPtr resident,
                                                            std::size_t tile, std::string bytes) {
  CO_TRY(const ModelVersion id, rpc::from_proto(resident->record().id()));
  const auto copies = copies_.store().find(id);
  const auto work = [resident, tile, copies, bytes = std::move(bytes)]() mutable {
    const auto buffer = std::as_writable_bytes(std::span(bytes));
    const Digest sealed = resident->sealed(tile);
    bool right = blake3(buffer) == sealed;
    for (const auto& copy : copies) {
      if (right) break;
      if (!refill(*resident, tile, *copy, buffer)) continue;
      right = blake3(buffer) == sealed;
    }
    return right ? std::optional(std::move(bytes)) : std::nullopt;
  };
  auto filling = async::offload(copies_.blocking_pool(), work);
  auto filled = co_await std::move(filling);
  if (filled) co_return std::move(*filled);
  co_return fail(ErrorCode::kCorrupt, "{} cannot be mended: {}", place_of(*resident, tile),
                 copies.empty() ? "this host has no copy of the version any more"
                                : "this host's copy has not the bytes that were sealed there");
}

async::Task<Result<void>> ResidentBytes::mend(OpenResidentPtr resident, std::size_t tile,
                                              std::function<bool()> may_write) {
  const std::string device = resident->record().device();
  CO_TRY(auto from, resident->part(tile, 1));
  auto reading = copy(device, std::move(from), "");
  CO_TRY(auto bytes, co_await std::move(reading));
  auto filling = right_bytes(resident, tile, std::move(bytes));
  CO_TRY(auto right, co_await std::move(filling));
  CO_TRY(auto to, resident->part(tile, 1));
  if (!may_write()) {
    co_return fail(ErrorCode::kStale, "the resident copy was dropped while it was mended");
  }
  auto writing = copy(device, std::move(to), std::move(right));
  CO_TRY_VOID(co_await std::move(writing));
  auto comparing = compare(resident, tile, 1);
  CO_TRY(const auto wrong, co_await std::move(comparing));
  if (wrong.empty()) co_return Result<void>();
  co_return fail(ErrorCode::kCorrupt, "{} is wrong again after the right bytes were written to it",
                 place_of(*resident, tile));
}

}  // namespace rekindle::worker
