#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

#include "src/base/result.h"

// Plain structures read and written as protobuf messages without libprotobuf. A structure names its
// fields once, in a table beside it; both directions use that table:
//
//   constexpr auto fields_of(const Hello*) {
//     return pbf::fields(pbf::field(1, &Hello::protocol), pbf::field(3, &Hello::software));
//   }
//
// Reading follows protobuf: it skips unknown fields, and the last value of a field counts. It
// throws protozero::exception for malformed bytes; parse() turns that into an Error.
namespace rekindle::pbf {

using protozero::pbf_reader;
using protozero::pbf_tag_type;
using protozero::pbf_wire_type;
using protozero::pbf_writer;

template <typename T>
concept Message = requires(const T* message) {
  fields_of(message);
};

template <Message T>
inline constexpr auto kFields = fields_of(static_cast<const T*>(nullptr));

// How one value is written under a number, and read. Types with a form of their own specialise it.
template <typename T>
struct Codec;

// Well-formed protobuf that a message does not allow.
class Refused : public protozero::exception {
 public:
  explicit Refused(const char* why) : why_(why) {}
  const char* what() const noexcept override { return why_; }

 private:
  const char* why_;
};

template <Message T>
void write(pbf_writer& out, const T& message) {
  std::apply([&](const auto&... field) { (field.add(out, message), ...); }, kFields<T>);
}

template <Message T>
void read(pbf_reader in, T& message) {
  while (in.next()) {
    const bool known = std::apply(
        [&](const auto&... field) { return (field.take(in, message) || ...); }, kFields<T>);
    if (!known) in.skip();
  }
}

template <Message T>
std::string serialize(const T& message) {
  std::string bytes;
  pbf_writer out(bytes);
  write(out, message);
  return bytes;
}

// `what` names the message in the Error, which is kInvalid.
template <Message T>
Result<T> parse(std::string_view bytes, std::string_view what) {
  try {
    T message;
    read(pbf_reader(bytes.data(), bytes.size()), message);
    return message;
  } catch (const protozero::exception& error) {
    return fail(ErrorCode::kInvalid, "a malformed {} of {} bytes: {}", what, bytes.size(),
                error.what());
  }
}

// --- entries of a table

template <typename Owner, typename T>
struct Field {
  pbf_tag_type number;
  T Owner::*member;

  void add(pbf_writer& out, const Owner& owner) const { Codec<T>::add(out, number, owner.*member); }
  bool take(pbf_reader& in, Owner& owner) const {
    if (in.tag() != number || in.wire_type() != Codec<T>::kWire) return false;
    Codec<T>::take(in, owner.*member);
    return true;
  }
};

// A `oneof` whose kinds are numbered without gaps: kind i of the variant has the number `first` +
// i. A leading std::monostate stands for "none" and has no number.
template <typename Variant>
inline constexpr std::size_t kUnnumbered =
    std::is_same_v<std::variant_alternative_t<0, Variant>, std::monostate> ? 1 : 0;

template <typename Variant>
void add_kind(pbf_writer& out, pbf_tag_type first, const Variant& kinds) {
  const auto number = first + static_cast<pbf_tag_type>(kinds.index() - kUnnumbered<Variant>);
  std::visit(
      [&]<typename T>(const T& kind) {
        if constexpr (!std::is_same_v<T, std::monostate>) Codec<T>::add(out, number, kind);
      },
      kinds);
}

template <typename Owner, typename... Kinds>
struct OneOf {
  using Variant = std::variant<Kinds...>;
  pbf_tag_type first;
  Variant Owner::*member;

  void add(pbf_writer& out, const Owner& owner) const { add_kind(out, first, owner.*member); }
  bool take(pbf_reader& in, Owner& owner) const {
    if (in.tag() < first || in.wire_type() != pbf_wire_type::length_delimited) return false;
    const std::size_t index = in.tag() - first + kUnnumbered<Variant>;
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return ((I == index && take_kind<I>(in, owner.*member)) || ...);
    }
    (std::index_sequence_for<Kinds...>());
  }

 private:
  template <std::size_t I>
  static bool take_kind(pbf_reader& in, Variant& kinds) {
    using T = std::variant_alternative_t<I, Variant>;
    if constexpr (std::is_same_v<T, std::monostate>) {
      return false;
    } else {
      T kind{};
      Codec<T>::take(in, kind);
      kinds = std::move(kind);
      return true;
    }
  }
};

template <typename Owner, typename T>
constexpr Field<Owner, T> field(pbf_tag_type number, T Owner::*member) {
  return {number, member};
}

template <typename Owner, typename... Kinds>
constexpr OneOf<Owner, Kinds...> one_of(pbf_tag_type first, std::variant<Kinds...> Owner::*member) {
  return {first, member};
}

template <typename... Entries>
constexpr std::tuple<Entries...> fields(Entries... entries) {
  return {entries...};
}

// --- values. As in proto3, a number 0, an empty text and an empty list are not written.

template <std::unsigned_integral T>
struct Codec<T> {
  static constexpr auto kWire = pbf_wire_type::varint;
  static void add(pbf_writer& out, pbf_tag_type number, T value) {
    if (value != 0) out.add_uint64(number, value);
  }
  static void take(pbf_reader& in, T& value) { value = static_cast<T>(in.get_uint64()); }
};

template <>
struct Codec<std::string> {
  static constexpr auto kWire = pbf_wire_type::length_delimited;
  static void add(pbf_writer& out, pbf_tag_type number, const std::string& text) {
    if (!text.empty()) out.add_string(number, text);
  }
  static void take(pbf_reader& in, std::string& text) {
    const protozero::data_view view = in.get_view();
    text.assign(view.data(), view.size());
  }
};

// Points into the bytes that are read.
template <>
struct Codec<std::string_view> {
  static constexpr auto kWire = pbf_wire_type::length_delimited;
  static void add(pbf_writer& out, pbf_tag_type number, std::string_view text) {
    if (!text.empty()) out.add_string(number, text.data(), text.size());
  }
  static void take(pbf_reader& in, std::string_view& text) {
    const protozero::data_view view = in.get_view();
    text = {view.data(), view.size()};
  }
};

// Packed.
template <>
struct Codec<std::vector<std::uint64_t>> {
  static constexpr auto kWire = pbf_wire_type::length_delimited;
  static void add(pbf_writer& out, pbf_tag_type number, const std::vector<std::uint64_t>& list) {
    if (!list.empty()) out.add_packed_uint64(number, list.begin(), list.end());
  }
  static void take(pbf_reader& in, std::vector<std::uint64_t>& list) {
    for (const std::uint64_t value : in.get_packed_uint64()) list.push_back(value);
  }
};

template <>
struct Codec<std::vector<std::string>> {
  static constexpr auto kWire = pbf_wire_type::length_delimited;
  static void add(pbf_writer& out, pbf_tag_type number, const std::vector<std::string>& list) {
    for (const std::string& text : list) out.add_string(number, text);
  }
  static void take(pbf_reader& in, std::vector<std::string>& list) {
    Codec<std::string>::take(in, list.emplace_back());
  }
};

template <Message T>
struct Codec<T> {
  static constexpr auto kWire = pbf_wire_type::length_delimited;
  // protozero withdraws a nested message without fields, so the body is made apart.
  static void add(pbf_writer& out, pbf_tag_type number, const T& message) {
    out.add_message(number, serialize(message));
  }
  static void take(pbf_reader& in, T& message) { read(in.get_message(), message); }
};

template <Message T>
struct Codec<std::optional<T>> {
  static constexpr auto kWire = pbf_wire_type::length_delimited;
  static void add(pbf_writer& out, pbf_tag_type number, const std::optional<T>& message) {
    if (message) Codec<T>::add(out, number, *message);
  }
  static void take(pbf_reader& in, std::optional<T>& message) {
    Codec<T>::take(in, message.emplace());
  }
};

template <Message T>
struct Codec<std::vector<T>> {
  static constexpr auto kWire = pbf_wire_type::length_delimited;
  static void add(pbf_writer& out, pbf_tag_type number, const std::vector<T>& list) {
    for (const T& message : list) Codec<T>::add(out, number, message);
  }
  static void take(pbf_reader& in, std::vector<T>& list) {
    Codec<T>::take(in, list.emplace_back());
  }
};

// --- proto/common.proto

// StatusCode is ErrorCode + 1; 0 is no error.
struct Status {
  std::uint32_t code = 0;
  std::string message;
};
constexpr auto fields_of(const Status*) {
  return fields(field(1, &Status::code), field(2, &Status::message));
}

inline Status status_of(const Error& error) {
  return {static_cast<std::uint32_t>(error.code()) + 1, error.message()};
}

// A code that a newer build has added becomes kInternal.
inline std::optional<Error> error_of(Status status) {
  if (status.code == 0) return std::nullopt;
  constexpr auto kLast = static_cast<std::uint32_t>(ErrorCode::kInternal) + 1;
  const auto code =
      status.code <= kLast ? static_cast<ErrorCode>(status.code - 1) : ErrorCode::kInternal;
  return Error(code, std::move(status.message));
}

template <>
struct Codec<std::optional<Error>> {
  static constexpr auto kWire = pbf_wire_type::length_delimited;
  static void add(pbf_writer& out, pbf_tag_type number, const std::optional<Error>& error) {
    if (error) Codec<Status>::add(out, number, status_of(*error));
  }
  static void take(pbf_reader& in, std::optional<Error>& error) {
    Status status;
    Codec<Status>::take(in, status);
    error = error_of(std::move(status));
  }
};

}  // namespace rekindle::pbf
