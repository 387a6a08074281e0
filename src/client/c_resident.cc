// The functions of the C ABI for parameters that outlive the worker.
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/client/c_boundary.h"
#include "src/client/session.h"

namespace rekindle::client {
namespace {

// With the agent's limit on a frame in mind.
constexpr std::uint64_t kMostDescription = 48u << 20;
constexpr std::size_t kMostKey = 4096;
constexpr std::size_t kMostBlocks = 64;

rk_block* make_handle(WorkerBlock block) {
  auto handle = std::make_unique<rk_block>();
  handle->object = std::make_shared<WorkerBlock>(std::move(block));
  return handle.release();
}

}  // namespace
}  // namespace rekindle::client

using namespace rekindle;          // NOLINT(google-build-using-namespace)
using namespace rekindle::client;  // NOLINT(google-build-using-namespace)

extern "C" {

RK_API int32_t rk_block_allocate(rk_session* session, uint64_t bytes, rk_block** block,
                                 rk_error* error) {
  if (block != nullptr) *block = nullptr;
  return with_object(session, error, [&](Session& object) -> Result<void> {
    if (block == nullptr) return fail(ErrorCode::kInvalid, "`block` is null");
    if (bytes == 0) return fail(ErrorCode::kInvalid, "a block of 0 bytes");
    TRY(auto made, object.allocate_block(bytes));
    *block = make_handle(std::move(made));
    return {};
  });
}

RK_API int32_t rk_block_memory(rk_block* block, void** data, uint64_t* bytes, rk_error* error) {
  return with_object(block, error, [&](const WorkerBlock& object) -> Result<void> {
    if (data == nullptr || bytes == nullptr) {
      return fail(ErrorCode::kInvalid, "`data` or `bytes` is null");
    }
    *data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(object.block->address()));
    *bytes = object.block->bytes();
    return {};
  });
}

RK_API int32_t rk_block_set_read_only(rk_block* block, uint32_t read_only, rk_error* error) {
  return with_object(block, error, [&](WorkerBlock& object) {
    return object.block->set_access(read_only != 0 ? bucket::Access::kRead
                                                   : bucket::Access::kWrite);
  });
}

RK_API void rk_block_free(rk_block* block) {
  end_handle(block, [](WorkerBlock& object) { object.block.reset(); });
}

RK_API int32_t rk_resident(rk_session* session, const void** description,
                           uint64_t* description_bytes, size_t* count, rk_error* error) {
  if (count != nullptr) *count = 0;
  return with_object(session, error, [&](const Session& object) -> Result<void> {
    if (description == nullptr || description_bytes == nullptr || count == nullptr) {
      return fail(ErrorCode::kInvalid, "`description`, `description_bytes` or `count` is null");
    }
    TRY(const ResidentCopy* const copy, object.resident());
    *description = copy->description.data();
    *description_bytes = copy->description.size();
    *count = copy->block_bytes.size();
    return {};
  });
}

RK_API int32_t rk_resident_open(rk_session* session, rk_block** blocks, size_t count,
                                rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    TRY(const ResidentCopy* const copy, object.resident());
    if (blocks == nullptr || count < copy->block_bytes.size()) {
      return fail(ErrorCode::kInvalid, "room for {} blocks, the copy has {}",
                  blocks == nullptr ? 0 : count, copy->block_bytes.size());
    }
    TRY(auto opened, object.open_resident());
    for (std::size_t i = 0; i < opened.size(); ++i) blocks[i] = make_handle(std::move(opened[i]));
    return {};
  });
}

RK_API int32_t rk_resident_seal(rk_session* session, const char* key, const void* description,
                                uint64_t description_bytes, rk_block* const* blocks, size_t count,
                                int64_t timeout_ms, rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    const std::string name = key == nullptr ? "" : key;
    if (name.empty() || name.size() > kMostKey) {
      return fail(ErrorCode::kInvalid, "a resident key of {} bytes: 1 to {} are possible",
                  name.size(), kMostKey);
    }
    if (description_bytes > kMostDescription || (description == nullptr && description_bytes > 0)) {
      return fail(ErrorCode::kInvalid, "a description of {} bytes: at most {} are possible",
                  description_bytes, kMostDescription);
    }
    if (blocks == nullptr || count == 0 || count > kMostBlocks) {
      return fail(ErrorCode::kInvalid, "{} blocks: 1 to {} are possible", count, kMostBlocks);
    }
    TRY(const auto timeout, checked_timeout(timeout_ms));
    std::vector<std::shared_ptr<WorkerBlock>> held;
    std::vector<WorkerBlock*> plain;
    for (const rk_block* const handle : std::span(blocks, count)) {
      TRY(auto block, object_of(handle));
      plain.push_back(block.get());
      held.push_back(std::move(block));
    }
    std::string text(static_cast<const char*>(description), description_bytes);
    return object.seal_resident(name, std::move(text), plain, timeout);
  });
}

}  // extern "C"
