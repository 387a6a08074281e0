#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "src/base/result.h"

namespace rekindle {

std::string to_hex(const std::uint8_t* bytes, std::size_t size);
bool from_hex(std::string_view text, std::uint8_t* bytes, std::size_t size);
void fill_random(void* bytes, std::size_t size);  // from the kernel, for ids and secrets

// A random 128-bit id; Tag makes each use its own type.
template <typename Tag>
struct Id128 {
  std::array<std::uint8_t, 16> bytes{};

  static Id128 random() {
    Id128 id;
    fill_random(id.bytes.data(), id.bytes.size());
    return id;
  }
  // From wire bytes; anything but 16 bytes is refused.
  static Result<Id128> from_bytes(std::string_view raw) {
    Id128 id;
    if (raw.size() != id.bytes.size()) {
      return fail(ErrorCode::kInvalid, "an id has 16 bytes, this one {}", raw.size());
    }
    std::memcpy(id.bytes.data(), raw.data(), raw.size());
    return id;
  }
  std::string to_bytes() const { return {bytes.begin(), bytes.end()}; }
  std::string hex() const { return to_hex(bytes.data(), bytes.size()); }
  bool is_nil() const { return *this == Id128{}; }
  auto operator<=>(const Id128&) const = default;
};

// One life of one process. Same address, new incarnation = a stranger.
using Incarnation = Id128<struct IncarnationTag>;
// Names one data-path session of one puller at one source; handed out in the handshake only.
using SessionToken = Id128<struct SessionTokenTag>;
using PullId = Id128<struct PullIdTag>;

// A model is a name; a version is an unsigned training step of it.
struct ModelVersion {
  std::string model;
  std::uint64_t version = 0;

  std::string to_string() const;  // "qwen3@41"
  auto operator<=>(const ModelVersion&) const = default;
};

// What a user names: "qwen3@41", or "qwen3" for the newest READY version.
struct ModelRef {
  std::string model;
  std::optional<std::uint64_t> version;

  static Result<ModelRef> parse(std::string_view text);
  std::string to_string() const;
};

// Names are 1 to 200 bytes of [A-Za-z0-9._/+-], no "..", no leading or trailing '/'.
Result<void> check_model_name(std::string_view name);

}  // namespace rekindle

template <typename Tag>
struct std::hash<rekindle::Id128<Tag>> {
  std::size_t operator()(const rekindle::Id128<Tag>& id) const noexcept {
    std::size_t value;
    std::memcpy(&value, id.bytes.data(), sizeof value);
    return value;
  }
};
