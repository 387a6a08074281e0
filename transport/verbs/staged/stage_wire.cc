#include "transport/verbs/staged/stage_wire.h"

#include <algorithm>
#include <concepts>

namespace rekindle::transport::verbs {
namespace {

constexpr std::uint8_t kRequest = 1;
constexpr std::uint8_t kAnswer = 2;

class Writer {
 public:
  explicit Writer(std::span<std::byte> out) : out_(out) {}
  template <std::unsigned_integral T>
  void put(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      out_[at_++] = static_cast<std::byte>(std::uint64_t{value} >> (8 * i) & 0xff);
    }
  }
  std::size_t size() const { return at_; }

 private:
  std::span<std::byte> out_;
  std::size_t at_ = 0;
};

// Of a message whose size was checked.
class Reader {
 public:
  explicit Reader(StageBytes in) : in_(in) {}
  template <std::unsigned_integral T>
  T get() {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      value |= std::to_integer<std::uint64_t>(in_[at_++]) << (8 * i);
    }
    return static_cast<T>(value);
  }

 private:
  StageBytes in_;
  std::size_t at_ = 0;
};

Result<void> check_head(Reader& reader, std::size_t bytes, std::size_t expected,
                        std::uint8_t type) {
  if (bytes != expected) {
    return fail(ErrorCode::kInvalid, "a staging message of {} bytes, expected {}", bytes, expected);
  }
  const auto version = reader.get<std::uint8_t>();
  if (version != kStageVersion) {
    return fail(ErrorCode::kInvalid, "a staging message of version {}, this side speaks {}",
                version, kStageVersion);
  }
  if (reader.get<std::uint8_t>() != type) {
    return fail(ErrorCode::kInvalid, "a staging message of another type");
  }
  return {};
}

Result<void> check_slot(std::uint16_t slot, const StageLimits& limits) {
  if (slot < limits.slots) return {};
  return fail(ErrorCode::kInvalid, "a staging message names block {} of {}", slot, limits.slots);
}

}  // namespace

// version u8, type u8, slot u16, sequence u32, region u32, generation u32, offset u64, stride u64,
// run_bytes u32, count u32
std::size_t encode(const StageRequest& request, std::span<std::byte> out) {
  Writer writer(out);
  writer.put(static_cast<std::uint8_t>(kStageVersion));
  writer.put(kRequest);
  writer.put(request.slot);
  writer.put(request.sequence);
  writer.put(request.region.region);
  writer.put(request.region.generation);
  writer.put(request.offset);
  writer.put(request.stride);
  writer.put(request.run_bytes);
  writer.put(request.count);
  return writer.size();
}

// version u8, type u8, slot u16, sequence u32, status u32, bytes u32
std::size_t encode(const StageAnswer& answer, std::span<std::byte> out) {
  Writer writer(out);
  writer.put(static_cast<std::uint8_t>(kStageVersion));
  writer.put(kAnswer);
  writer.put(answer.slot);
  writer.put(answer.sequence);
  writer.put(static_cast<std::uint32_t>(answer.status));
  writer.put(answer.bytes);
  return writer.size();
}

Result<StageRequest> parse_stage_request(StageBytes bytes, const StageLimits& limits) {
  Reader reader(bytes);
  TRY_VOID(check_head(reader, bytes.size(), kStageRequestBytes, kRequest));
  StageRequest request;
  request.slot = reader.get<std::uint16_t>();
  request.sequence = reader.get<std::uint32_t>();
  request.region.region = reader.get<std::uint32_t>();
  request.region.generation = reader.get<std::uint32_t>();
  request.offset = reader.get<std::uint64_t>();
  request.stride = reader.get<std::uint64_t>();
  request.run_bytes = reader.get<std::uint32_t>();
  request.count = reader.get<std::uint32_t>();
  TRY_VOID(check_slot(request.slot, limits));
  if (request.total_bytes() == 0 || request.total_bytes() > limits.block_bytes) {
    return fail(ErrorCode::kInvalid, "{} runs of {} bytes for a block of {}", request.count,
                request.run_bytes, limits.block_bytes);
  }
  if (request.count == 1 && request.stride != 0) {
    return fail(ErrorCode::kInvalid, "a stride of {} for a single run", request.stride);
  }
  return request;
}

Result<StageAnswer> parse_stage_answer(StageBytes bytes, const StageLimits& limits) {
  Reader reader(bytes);
  TRY_VOID(check_head(reader, bytes.size(), kStageAnswerBytes, kAnswer));
  StageAnswer answer;
  answer.slot = reader.get<std::uint16_t>();
  answer.sequence = reader.get<std::uint32_t>();
  const auto status = reader.get<std::uint32_t>();
  answer.bytes = reader.get<std::uint32_t>();
  TRY_VOID(check_slot(answer.slot, limits));
  constexpr OpStatus kSaid[] = {OpStatus::kOk, OpStatus::kStale, OpStatus::kDenied,
                                OpStatus::kInvalid, OpStatus::kFault};
  const auto* const known = std::find_if(std::begin(kSaid), std::end(kSaid), [&](OpStatus said) {
    return static_cast<std::uint32_t>(said) == status;
  });
  if (known == std::end(kSaid)) {
    return fail(ErrorCode::kInvalid, "an answer of status {}, which no source says", status);
  }
  answer.status = *known;
  const bool fits = answer.status == OpStatus::kOk
                        ? answer.bytes > 0 && answer.bytes <= limits.block_bytes
                        : answer.bytes == 0;
  if (!fits) {
    return fail(ErrorCode::kInvalid, "an answer of {} with {} bytes in a block of {}",
                to_string(answer.status), answer.bytes, limits.block_bytes);
  }
  return answer;
}

}  // namespace rekindle::transport::verbs
