#include "src/cuda/nccl.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <dlfcn.h>
#include <nccl.h>

#include "src/cuda/cuda_device.h"
#include "src/cuda/stream.h"

namespace rekindle::cuda {

namespace {

// The first version with non-blocking communicators.
constexpr int kOldestNccl = 21'400;

static_assert(std::tuple_size_v<Nccl::UniqueId> == sizeof(ncclUniqueId));

ErrorCode code_of(int result) {
  switch (result) {
    case ncclRemoteError:
      return ErrorCode::kPeerLost;
    case ncclSystemError:
      return ErrorCode::kUnavailable;
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      return ErrorCode::kInvalid;
    default:
      return ErrorCode::kInternal;
  }
}

void* pointer(bucket::DeviceAddress address) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}

cudaStream_t native(bucket::Stream& stream) { return static_cast<CudaStream&>(stream).get(); }

}  // namespace

#define REKINDLE_NCCL_CALLS(CALL)          \
  CALL(get_version, ncclGetVersion)        \
  CALL(get_unique_id, ncclGetUniqueId)     \
  CALL(error_text, ncclGetErrorString)     \
  CALL(last_error, ncclGetLastError)       \
  CALL(group_start, ncclGroupStart)        \
  CALL(group_end, ncclGroupEnd)            \
  CALL(init_rank, ncclCommInitRankConfig)  \
  CALL(abort, ncclCommAbort)               \
  CALL(async_error, ncclCommGetAsyncError) \
  CALL(broadcast, ncclBroadcast)           \
  CALL(all_gather, ncclAllGather)

struct Nccl::Calls {
#define REKINDLE_NCCL_MEMBER(member, function) decltype(&::function) member = nullptr;
  REKINDLE_NCCL_CALLS(REKINDLE_NCCL_MEMBER)
#undef REKINDLE_NCCL_MEMBER
};

Nccl::Nccl(std::unique_ptr<Calls> calls) : calls_(std::move(calls)) {}
Nccl::~Nccl() = default;

Result<std::shared_ptr<const Nccl>> Nccl::load(const char* library) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* said = ::dlerror();
    return fail(ErrorCode::kNotFound, "no NCCL ({} does not load): {}; install libnccl2", library,
                said == nullptr ? "" : said);
  }
  auto calls = std::make_unique<Calls>();
  const char* missing = nullptr;
#define REKINDLE_NCCL_FIND(member, function)                                             \
  calls->member = reinterpret_cast<decltype(calls->member)>(::dlsym(handle, #function)); \
  if (calls->member == nullptr) missing = #function;
  REKINDLE_NCCL_CALLS(REKINDLE_NCCL_FIND)
#undef REKINDLE_NCCL_FIND
  if (missing != nullptr) {
    return fail(ErrorCode::kNotFound, "{} is no NCCL of version 2.14 or newer (it lacks {})",
                library, missing);
  }
  std::shared_ptr<Nccl> nccl(new Nccl(std::move(calls)));
  TRY_VOID(nccl->check(nccl->calls_->get_version(&nccl->version_), nullptr, "ask for its version"));
  if (nccl->version_ < kOldestNccl) {
    return fail(ErrorCode::kNotFound, "{} is NCCL {}: 2.14 or newer is needed", library,
                nccl->version_);
  }
  return nccl;
}

Error Nccl::error(int result, ncclComm* communicator, std::string_view what) const {
  const auto typed = static_cast<ncclResult_t>(result);
  const char* text = calls_->error_text(typed);
  const char* detail = calls_->last_error(communicator);
  std::string more = detail == nullptr ? "" : detail;
  std::replace(more.begin(), more.end(), '\n', ' ');
  while (!more.empty() && more.back() == ' ') more.pop_back();
  return {code_of(result), fmt::format("NCCL: {}: {} ({}){}{}", what, text == nullptr ? "" : text,
                                       result, more.empty() ? "" : ": ", more)};
}

Result<void> Nccl::check(int result, ncclComm* communicator, std::string_view what) const {
  if (result == ncclSuccess || result == ncclInProgress) return {};
  return fail(error(result, communicator, what));
}

Result<Nccl::UniqueId> Nccl::make_id() const {
  ncclUniqueId native_id{};
  TRY_VOID(check(calls_->get_unique_id(&native_id), nullptr, "make a unique id"));
  UniqueId id{};
  std::memcpy(id.data(), native_id.internal, id.size());
  return id;
}

Communicator::Communicator(std::shared_ptr<const Nccl> nccl, std::shared_ptr<const Context> context,
                           Rank rank)
    : nccl_(std::move(nccl)), context_(std::move(context)), rank_(rank) {}

Communicator::~Communicator() { abort(); }

// NCCL takes the device from the thread, and sometimes leaves another device current.
template <typename Call>
int Communicator::run(Call&& call) const {
  int result = ncclUnhandledCudaError;
  context_->run([&] {
    result = call(*nccl_->calls_);
    return CUDA_SUCCESS;
  });
  return result;
}

Result<void> Nccl::group(const Communicator& any, const std::function<Result<void>()>& body) const {
  TRY_VOID(check(calls_->group_start(), nullptr, "start a group"));
  auto queued = body();
  auto ended =
      check(any.run([](const auto& calls) { return calls.group_end(); }), nullptr, "end a group");
  return queued ? std::move(ended) : std::move(queued);
}

Result<std::unique_ptr<Communicator>> Communicator::start(std::shared_ptr<const Nccl> nccl,
                                                          bucket::Device& device, Rank rank,
                                                          const Nccl::UniqueId& id) {
  const auto* const gpu = dynamic_cast<CudaDevice*>(&device);
  if (gpu == nullptr) {
    return fail(ErrorCode::kInvalid, "NCCL needs a GPU, and {} is none", device.id());
  }
  ncclUniqueId native_id{};
  std::memcpy(native_id.internal, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  std::unique_ptr<Communicator> communicator(
      new Communicator(std::move(nccl), gpu->context(), rank));
  const int result = communicator->run([&](const auto& calls) {
    return calls.init_rank(&communicator->communicator_, rank.ranks, native_id, rank.rank, &config);
  });
  TRY_VOID(communicator->nccl_->check(
      result, nullptr,
      fmt::format("start rank {} of {} on {}", rank.rank, rank.ranks, device.id())));
  return communicator;
}

Result<void> Communicator::broadcast(bucket::DeviceAddress from, bucket::DeviceAddress to,
                                     std::uint64_t bytes, int root, bucket::Stream& stream) {
  const int result = run([&](const auto& calls) {
    return calls.broadcast(pointer(from), pointer(to), bytes, ncclUint8, root, communicator_,
                           native(stream));
  });
  return nccl_->check(result, communicator_, fmt::format("broadcast {} bytes", bytes));
}

Result<void> Communicator::all_gather(bucket::DeviceAddress from, bucket::DeviceAddress to,
                                      std::uint64_t bytes, bucket::Stream& stream) {
  const int result = run([&](const auto& calls) {
    return calls.all_gather(pointer(from), pointer(to), bytes, ncclUint8, communicator_,
                            native(stream));
  });
  return nccl_->check(result, communicator_, fmt::format("gather {} bytes of each rank", bytes));
}

Result<bool> Communicator::settled() {
  ncclResult_t state = ncclSuccess;
  const int result =
      run([&](const auto& calls) { return calls.async_error(communicator_, &state); });
  TRY_VOID(nccl_->check(result, communicator_, "ask for its state"));
  TRY_VOID(nccl_->check(state, communicator_, fmt::format("rank {} of {}", rank(), ranks())));
  return state == ncclSuccess;
}

void Communicator::abort() {
  ncclComm* const aborted = std::exchange(communicator_, nullptr);
  if (aborted == nullptr) return;
  run([&](const auto& calls) { return calls.abort(aborted); });
}

}  // namespace rekindle::cuda
