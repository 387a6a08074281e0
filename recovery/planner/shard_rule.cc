#include "recovery/planner/shard_rule.h"

#include <algorithm>
#include <string>

#include <fmt/format.h>

namespace rekindle::planner {

namespace {

using nlohmann::json;
using Rule = ShardSpec::Rule;
using Kind = Rule::Kind;

constexpr std::size_t kMaxPatterns = 64;
constexpr std::uint64_t kMaxFactor = 1 << 20;

struct KindInfo {
  const char* name;
  Kind kind;
  std::vector<std::string> required;
  std::vector<std::string> allowed;
};

const std::vector<KindInfo>& kinds() {
  static const std::vector<KindInfo> table = {
      {"replicate", Kind::kReplicate, {}, {}},
      {"split", Kind::kSplit, {"dim"}, {"parts", "unit", "padded"}},
      {"heads", Kind::kHeads, {"dim", "heads"}, {}},
      {"kv_heads", Kind::kKvHeads, {"dim", "heads"}, {}},
      {"qkv", Kind::kQkv, {"dim", "heads", "kv_heads"}, {}},
      {"vocab", Kind::kVocab, {"dim"}, {"pad_to"}},
      {"experts", Kind::kExperts, {"count"}, {"dim", "expert_dim", "parts", "unit", "padded"}},
      {"scale", Kind::kScale, {"of", "block"}, {}},
  };
  return table;
}

// Reads the fields of one rule. The first mistake stays in `error`.
class Fields {
 public:
  explicit Fields(const json& object) : object_(object) {}

  template <typename... Args>
  void wrong(fmt::format_string<Args...> format, Args&&... args) {
    if (error.empty()) error = fmt::format(format, std::forward<Args>(args)...);
  }
  const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  void boolean(const char* key, bool& value) {
    const json* found = find(key);
    if (found == nullptr) return;
    if (!found->is_boolean()) return wrong("'{}' must be true or false", key);
    value = found->get<bool>();
  }
  void factor(const char* key, std::uint64_t& value) {
    const json* found = find(key);
    if (found == nullptr) return;
    if (!is_factor(*found)) return wrong("'{}' must be an integer from 1 to {}", key, kMaxFactor);
    value = found->get<std::uint64_t>();
  }
  void dimension(const char* key, std::optional<std::size_t>& value) {
    const json* found = find(key);
    if (found == nullptr) return;
    if (!found->is_number_unsigned() || found->get<std::uint64_t>() >= kMaxRank) {
      return wrong("'{}' must be a dimension from 0 to {}", key, kMaxRank - 1);
    }
    value = found->get<std::size_t>();
  }
  void text(const char* key, std::string& value) {
    const json* found = find(key);
    if (found == nullptr) return;
    if (!found->is_string() || found->get_ref<const std::string&>().empty()) {
      return wrong("'{}' must be a text", key);
    }
    value = found->get<std::string>();
  }
  void config_value(const char* key, ConfigValue& value) {
    const json* found = find(key);
    if (found == nullptr) return;
    if (is_factor(*found)) {
      value.literal = found->get<std::uint64_t>();
      return;
    }
    std::string all;
    text(key, all);
    for (std::size_t begin = 0; begin <= all.size();) {
      const std::size_t bar = std::min(all.find('|', begin), all.size());
      if (bar == begin) return wrong("'{}' must be a number or a key of config.json", key);
      value.keys.push_back(all.substr(begin, bar - begin));
      begin = bar + 1;
    }
  }
  void block(Rule& rule) {
    const json* found = find("block");
    if (found == nullptr) return;
    if (found->is_string()) return text("block", rule.block_key);
    if (!found->is_array() || found->empty() || found->size() > kMaxRank ||
        !std::all_of(found->begin(), found->end(), is_factor)) {
      return wrong("'block' must be a list of positive integers or a key of config.json");
    }
    for (const json& extent : *found) rule.block.push_back(extent.get<std::uint64_t>());
  }

  std::string error;

 private:
  static bool is_factor(const json& value) {
    return value.is_number_unsigned() && value.get<std::uint64_t>() >= 1 &&
           value.get<std::uint64_t>() <= kMaxFactor;
  }
  const json& object_;
};

void parse_match(Fields& fields, Rule& rule) {
  const json* match = fields.find("match");
  if (match == nullptr) return fields.wrong("'match' is missing");
  const auto add = [&](const json& one) {
    if (!one.is_string()) return fields.wrong("'match' must be a text or a list of texts");
    auto pattern = Pattern::parse(one.get_ref<const std::string&>());
    if (!pattern) return fields.wrong("{}", pattern.error().message());
    rule.patterns.push_back(std::move(*pattern));
  };
  if (!match->is_array()) return add(*match);
  if (match->empty() || match->size() > kMaxPatterns) {
    return fields.wrong("'match' must list 1 to {} patterns", kMaxPatterns);
  }
  for (const json& one : *match) add(one);
}

void parse_kind(const json& object, Fields& fields, Rule& rule) {
  std::string name;
  fields.text("kind", name);
  const auto info = std::find_if(kinds().begin(), kinds().end(),
                                 [&](const KindInfo& one) { return name == one.name; });
  if (info == kinds().end()) {
    return fields.wrong(
        "'kind' must be replicate, split, heads, kv_heads, qkv, vocab, experts or scale");
  }
  rule.kind = info->kind;
  const auto has = [](const std::vector<std::string>& keys, const std::string& key) {
    return std::find(keys.begin(), keys.end(), key) != keys.end();
  };
  static const std::vector<std::string> always = {"match", "kind", "stage", "optional", "comment"};
  for (const auto& [key, value] : object.items()) {
    if (has(always, key) || has(info->required, key) || has(info->allowed, key)) continue;
    return fields.wrong("kind '{}' has no field {}", name, json(key).dump());
  }
  for (const std::string& key : info->required) {
    if (!object.contains(key)) return fields.wrong("kind '{}' needs '{}'", name, key);
  }
}

void parse_stage(Fields& fields, Rule& rule) {
  std::string stage;
  fields.text("stage", stage);
  if (stage.empty()) return;
  if (std::any_of(rule.patterns.begin(), rule.patterns.end(),
                  [](const Pattern& pattern) { return pattern.has_layer(); })) {
    return fields.wrong("'stage' has no meaning where {{layer}} decides");
  }
  if (stage == "all") {
    rule.stage = Rule::Stage::kAll;
  } else if (stage == "first") {
    rule.stage = Rule::Stage::kFirst;
  } else if (stage == "last") {
    rule.stage = Rule::Stage::kLast;
  } else if (stage == "embedding") {
    rule.stage = Rule::Stage::kEmbedding;
  } else {
    fields.wrong("'stage' must be all, first, last or embedding");
  }
}

void check_rule(Fields& fields, const Rule& rule) {
  const bool all_experts = std::all_of(rule.patterns.begin(), rule.patterns.end(),
                                       [](const Pattern& one) { return one.has_expert(); });
  const bool no_expert = std::none_of(rule.patterns.begin(), rule.patterns.end(),
                                      [](const Pattern& one) { return one.has_expert(); });
  if (rule.kind == Kind::kExperts) {
    if (rule.expert_dim ? !no_expert : !all_experts) {
      fields.wrong("kind 'experts' needs either {{expert}} in each pattern or 'expert_dim'");
    }
    if (rule.expert_dim && rule.dim == rule.expert_dim) {
      fields.wrong("'dim' and 'expert_dim' must differ");
    }
  } else if (!no_expert && rule.kind != Kind::kScale) {
    fields.wrong("{{expert}} belongs to kind 'experts'");
  }
}

}  // namespace

Result<Rule> parse_rule(const json& object, std::size_t number) {
  Rule rule;
  rule.label = fmt::format("rule {}", number);
  if (!object.is_object()) {
    return fail(ErrorCode::kInvalid, "{}: not a JSON object", rule.label);
  }
  Fields fields(object);
  parse_match(fields, rule);
  if (!rule.patterns.empty()) {
    rule.label = fmt::format("rule {} ('{}')", number, rule.patterns.front().text());
  }
  parse_kind(object, fields, rule);
  parse_stage(fields, rule);
  std::string comment;
  fields.text("comment", comment);
  fields.boolean("optional", rule.optional);
  fields.dimension("dim", rule.dim);
  fields.factor("parts", rule.parts);
  fields.factor("unit", rule.unit);
  fields.boolean("padded", rule.padded);
  fields.config_value("heads", rule.heads);
  fields.config_value("kv_heads", rule.kv_heads);
  fields.factor("pad_to", rule.pad_to);
  fields.config_value("count", rule.count);
  fields.dimension("expert_dim", rule.expert_dim);
  fields.text("of", rule.of);
  fields.block(rule);
  check_rule(fields, rule);
  if (!fields.error.empty()) {
    return fail(ErrorCode::kInvalid, "{}: {}", rule.label, fields.error);
  }
  return rule;
}

}  // namespace rekindle::planner
