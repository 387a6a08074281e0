#include "recovery/rpc/rights.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include <fmt/ranges.h>
#include <google/protobuf/util/json_util.h>
#include <nlohmann/json.hpp>

#include "proto/rights.pb.h"
#include "recovery/rpc/handshake.h"
#include "recovery/rpc/methods.h"
#include "src/base/glob.h"
#include "src/base/settings_file.h"
#include "src/base/strict_json.h"
#include "src/base/text.h"

namespace rekindle::rpc {

namespace {

constexpr std::size_t kMaxRightsBytes = std::size_t{1} << 20;
constexpr int kMaxRightsDepth = 8;

bool any_matches(const std::vector<std::string>& globs, const std::string& text) {
  return std::ranges::any_of(globs,
                             [&](const std::string& glob) { return matches_glob(glob, text); });
}

Result<void> check_globs(const google::protobuf::RepeatedPtrField<std::string>& globs,
                         const std::string& place, std::string_view field,
                         Result<void> (*check)(std::string_view)) {
  for (int i = 0; i < globs.size(); ++i) {
    if (const auto checked = check(globs.Get(i)); !checked) {
      return fail(ErrorCode::kInvalid, "{}.{}[{}]: '{}' is no pattern: {}", place, field, i,
                  cut_text(globs.Get(i), 64), checked.error().message());
    }
  }
  return {};
}

// Protobuf takes null and an empty list for none, which stands for all models. Whoever reads the
// file takes them for no model.
Result<void> check_line(const nlohmann::json& line, const std::string& where) {
  if (!line.is_object()) {
    return fail(ErrorCode::kInvalid, "{}: a line is an object with `principals` and `verbs`",
                where);
  }
  for (const char* const field : {"principals", "verbs", "models"}) {
    const auto list = line.find(field);
    if (list == line.end()) continue;
    if (list->is_array() && !list->empty() &&
        std::ranges::all_of(*list, [](const auto& each) { return each.is_string(); })) {
      continue;
    }
    return fail(ErrorCode::kInvalid, "{}.{}: it must be a list of strings that is not empty{}",
                where, field,
                field == std::string_view("models")
                    ? ": name models, or [\"*\"] for all of them, or leave `models` out, which "
                      "means the same"
                    : "");
  }
  return {};
}

Result<void> check_shape(const nlohmann::json& file, const std::string& place) {
  if (!file.is_object()) {
    return fail(ErrorCode::kInvalid, "{}: it must be an object with the list `rights`", place);
  }
  const auto rights = file.find("rights");
  if (rights == file.end()) return {};
  if (!rights->is_array()) {
    return fail(ErrorCode::kInvalid, "{}: `rights` must be a list of objects", place);
  }
  std::size_t index = 0;
  for (const auto& line : *rights) {
    TRY_VOID(check_line(line, fmt::format("{}: rights[{}]", place, index)));
    ++index;
  }
  return {};
}

// protobuf's messages have several lines, with the text around the error.
std::string one_line(std::string_view text) {
  std::string line(cut_text(text, 512));
  std::ranges::replace(line, '\n', ' ');
  return line;
}

}  // namespace

std::vector<std::string> principals_of(const Peer& peer) {
  if (peer.principals.empty()) return {std::string(kUnproven)};
  return peer.principals;
}

Result<Rights> Rights::parse(const std::string& json, const std::string& place) {
  const auto bad = [&](std::string_view why) {
    return fail(ErrorCode::kInvalid, "{}; see `rekindle auth --help` for an example",
                one_line(why));
  };
  const auto file = parse_strict_json(json, place, kMaxRightsBytes, kMaxRightsDepth);
  if (!file) return bad(file.error().message());
  if (auto shape = check_shape(*file, place); !shape) return bad(shape.error().message());
  proto::Rights message;
  const auto parsed = google::protobuf::util::JsonStringToMessage(json, &message);
  if (!parsed.ok()) return bad(fmt::format("{}: {}", place, std::string(parsed.message())));
  Rights rights;
  rights.place_ = place;
  for (int i = 0; i < message.rights_size(); ++i) {
    const proto::Right& right = message.rights(i);
    const std::string where = fmt::format("{}: rights[{}]", place, i);
    if (right.principals().empty() || right.verbs().empty()) {
      return fail(ErrorCode::kInvalid,
                  "{}: a line needs `principals` and `verbs`; remove it, or complete it", where);
    }
    TRY_VOID(check_globs(right.principals(), where, "principals", check_glob));
    TRY_VOID(check_globs(right.models(), where, "models", check_model_glob));
    Line line{{right.principals().begin(), right.principals().end()},
              {},
              {right.models().begin(), right.models().end()}};
    for (const std::string& name : right.verbs()) {
      const auto verb = verb_from(name);
      if (!verb) {
        return fail(ErrorCode::kInvalid, "{}.verbs: '{}' is no verb; there are: {}", where,
                    cut_text(name, 64), verb_names());
      }
      line.verbs.push_back(*verb);
    }
    rights.lines_.push_back(std::move(line));
  }
  return rights;
}

Result<Rights> Rights::read(const std::filesystem::path& file) {
  auto text = read_trusted_file(file, kMaxRightsBytes);
  if (!text) return fail(std::move(text).error().with_context("rights file"));
  return parse(*text, "rights file " + file.string());
}

Result<std::string> Rights::allow(std::span<const std::string> principals, Verb verb,
                                  const std::string& model) const {
  for (std::size_t i = 0; i < lines_.size(); ++i) {
    const Line& line = lines_[i];
    if (std::ranges::find(line.verbs, verb) == line.verbs.end()) continue;
    const auto named = std::ranges::find_if(
        principals, [&](const std::string& each) { return any_matches(line.principals, each); });
    if (named == principals.end()) continue;
    const bool every_model =
        line.models.empty() || std::ranges::find(line.models, "*") != line.models.end();
    if (every_model || (!model.empty() && any_matches(line.models, model))) {
      return fmt::format("rights[{}] gives {} `{}` on {}", i, *named, verb_name(verb),
                         every_model ? "all models" : cut_text(model, 128));
    }
  }
  std::vector<std::string_view> shown;
  for (const std::string& each : principals) {
    if (shown.size() < 4) shown.push_back(cut_text(each, 128));
  }
  return fail(ErrorCode::kDenied,
              "no line of {} gives {} the right `{}`{}; add one there and send SIGHUP to the "
              "coordinator",
              place_, fmt::join(shown, ", "), verb_name(verb),
              model.empty() ? "" : fmt::format(" on {}", cut_text(model, 128)));
}

std::vector<proto::Right> Rights::lines_of(std::span<const std::string> principals) const {
  std::vector<proto::Right> found;
  for (const Line& line : lines_) {
    if (std::ranges::none_of(principals, [&](const std::string& each) {
          return any_matches(line.principals, each);
        })) {
      continue;
    }
    proto::Right right;
    right.mutable_principals()->Add(line.principals.begin(), line.principals.end());
    for (const Verb verb : line.verbs) *right.add_verbs() = verb_name(verb);
    right.mutable_models()->Add(line.models.begin(), line.models.end());
    found.push_back(std::move(right));
  }
  return found;
}

proto::WhoamiResponse whoami(const Peer& peer) {
  const auto proof_name = [&] {
    switch (peer.proof) {
      case Proof::kLocalUser:
        return "local user";
      case Proof::kSecret:
        return "secret";
      case Proof::kCertificate:
        return "certificate";
      case Proof::kNone:
        break;
    }
    return "none";
  };
  proto::WhoamiResponse answer;
  answer.set_role(std::string(role_name(peer.role)));
  answer.set_node_id(peer.node_id);
  answer.set_address(peer.address);
  answer.set_proof(proof_name());
  answer.mutable_principals()->Add(peer.principals.begin(), peer.principals.end());
  // Before protocol 3, a secret protects the handshake only.
  const bool over_tls = peer.proof == Proof::kSecret || peer.proof == Proof::kCertificate;
  answer.set_encrypted(over_tls && !peer.public_key.empty());
  return answer;
}

}  // namespace rekindle::rpc
