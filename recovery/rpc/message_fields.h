#pragma once

#include <string>
#include <tuple>
#include <type_traits>

#include "recovery/rpc/convert.h"

// A table of the fields that a struct and its protobuf message have under the same names:
//
//   constexpr rpc::Fields kLine{WIRE_FIELD(name), WIRE_FIELD(bytes)};
//   kLine.write(line, message);
//   TRY_VOID(kLine.read(message, line));
namespace rekindle::rpc {

// Numbers, strings, ids, types that have to_proto(), and lists of these.
template <typename Message, typename Value>
void put_field(Message& message, const Value& value) {
  if constexpr (std::is_assignable_v<Message&, const Value&>) {
    message = value;
  } else if constexpr (requires { value.begin(); }) {
    for (const auto& item : value) put_field(*message.Add(), item);
  } else if constexpr (std::is_same_v<Message, std::string>) {
    message = value.to_bytes();
  } else {
    message = to_proto(value);
  }
}

// Numbers, strings, ids, digests, versions, and lists of these. An error: no valid id or version.
template <typename Message, typename Value>
Result<void> take_field(const Message& message, Value& value) {
  if constexpr (std::is_assignable_v<Value&, const Message&>) {
    value = message;
  } else if constexpr (std::is_same_v<Value, Digest>) {
    value = from_proto(message);
  } else if constexpr (std::is_same_v<Value, ModelVersion>) {
    TRY(value, from_proto(message));
  } else if constexpr (std::is_same_v<Message, std::string>) {
    TRY(value, Value::from_bytes(message));
  } else {
    for (const auto& item : message) TRY_VOID(take_field(item, value.emplace_back()));
  }
  return {};
}

template <typename Member, typename Get, typename Put>
struct Field {
  Member member;
  Get get;
  Put put;
};
template <typename Member, typename Get, typename Put>
constexpr Field<Member, Get, Put> make_field(Member member, Get get, Put put) {
  return {member, get, put};
}

template <typename... Rows>
class Fields {
 public:
  constexpr explicit Fields(Rows... rows) : rows_(rows...) {}

  template <typename Value, typename Message>
  void write(const Value& value, Message& message) const {
    std::apply([&](const auto&... row) { (row.put(message, row.member(value)), ...); }, rows_);
  }
  // Returns the first error. Fields after it keep their values.
  template <typename Message, typename Value>
  Result<void> read(const Message& message, Value& value) const {
    Result<void> result;
    const auto take = [&](const auto& row) {
      result = take_field(row.get(message), row.member(value));
      return result.has_value();
    };
    std::apply([&](const auto&... row) { (void)(take(row) && ...); }, rows_);
    return result;
  }

 private:
  std::tuple<Rows...> rows_;
};

}  // namespace rekindle::rpc

#define WIRE_FIELD(name)                                                    \
  ::rekindle::rpc::make_field(                                              \
      [](auto& value) -> auto& { return value.name; },                      \
      [](const auto& message) -> decltype(auto) { return message.name(); }, \
      [](auto& message, const auto& value) {                                \
        using Wire = std::decay_t<decltype(message.name())>;                \
        if constexpr (std::is_convertible_v<decltype(value), Wire>) {       \
          message.set_##name(value);                                        \
        } else {                                                            \
          ::rekindle::rpc::put_field(*message.mutable_##name(), value);     \
        }                                                                   \
      })
