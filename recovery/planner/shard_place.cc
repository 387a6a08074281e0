#include <charconv>

#include <fmt/format.h>

#include "recovery/planner/shard_json.h"
#include "recovery/planner/shard_spec.h"

namespace rekindle::planner {

namespace {

constexpr std::uint32_t kMaxAxis = 1 << 16;

bool parse_number(std::string_view text, std::uint32_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

Result<ShardPlace> parse_place(std::string_view text) {
  const auto bad = [&](std::string_view why) {
    return fail(ErrorCode::kInvalid,
                "shard '{}': {}; write tp=RANK/SIZE, pp=… or ep=…, e.g. tp=3/8", text, why);
  };
  ShardPlace place;
  std::string seen;
  std::string_view rest = text;
  while (true) {
    const auto comma = rest.find(',');
    const std::string_view one = rest.substr(0, comma);
    const auto equals = one.find('=');
    const auto slash = one.find('/');
    if (equals == std::string_view::npos || slash == std::string_view::npos || slash < equals) {
      return bad(fmt::format("'{}' is not AXIS=RANK/SIZE", one));
    }
    const std::string_view name = one.substr(0, equals);
    ShardPlace::Axis* axis = name == "tp" ? &place.tp : name == "pp" ? &place.pp : &place.ep;
    if (axis == &place.ep && name != "ep") return bad(fmt::format("there is no axis '{}'", name));
    const std::string mark = fmt::format("{} ", name);
    if (seen.find(mark) != std::string::npos) return bad(fmt::format("{} is given twice", name));
    seen += mark;
    if (!parse_number(one.substr(equals + 1, slash - equals - 1), axis->rank) ||
        !parse_number(one.substr(slash + 1), axis->size)) {
      return bad(fmt::format("'{}' is not AXIS=RANK/SIZE", one));
    }
    if (axis->size == 0 || axis->size > kMaxAxis) {
      return bad(fmt::format("{} must have 1 to {} ranks", name, kMaxAxis));
    }
    if (axis->rank >= axis->size) {
      return bad(fmt::format("ranks of {} count from 0 to {}", name, axis->size - 1));
    }
    if (comma == std::string_view::npos) return place;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace

Result<ShardPlace> ShardPlace::parse(std::string_view text) { return one_line(parse_place(text)); }

std::string ShardPlace::to_string() const {
  std::string text;
  const auto add = [&](std::string_view name, const Axis& axis) {
    if (axis.size == 1) return;
    text += fmt::format("{}{}={}/{}", text.empty() ? "" : ",", name, axis.rank, axis.size);
  };
  add("tp", tp);
  add("pp", pp);
  add("ep", ep);
  return text.empty() ? "tp=0/1" : text;
}

}  // namespace rekindle::planner
