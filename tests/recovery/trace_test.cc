#include <chrono>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "recovery/trace/otlp_json.h"
#include "recovery/trace/trace_wire.h"
#include "recovery/trace/tracer.h"

namespace rekindle::trace {
namespace {

using namespace std::chrono_literals;

Span some_span() {
  Span span;
  span.context = {TraceId::random(), SpanId::random()};
  span.parent = SpanId::random();
  span.name = "source";
  span.service = "agent";
  span.node = "b";
  span.start = std::chrono::nanoseconds(1'700'000'000'123'456'789);
  span.duration = std::chrono::milliseconds(5);
  span.attributes = {{"rekindle.source", "a"}, {"rekindle.bytes", std::int64_t{1} << 40}};
  span.error = "lost";
  return span;
}

constexpr const char* kParent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TEST(TraceContext, IsReadFromATraceparentHeader) {
  const auto context = Context::parse(kParent);
  ASSERT_TRUE(context);
  EXPECT_EQ(context->trace.hex(), "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(context->span.hex(), "00f067aa0ba902b7");
  // A later version may have more behind the flags.
  const std::string later = "01" + std::string(kParent).substr(2);
  EXPECT_TRUE(Context::parse(later));
  EXPECT_TRUE(Context::parse(later + "-more"));
}

TEST(TraceContext, IgnoresWhatIsNone) {
  const std::string good = kParent;
  auto with = [&](std::size_t at, const std::string& text) {
    return std::string(good).replace(at, text.size(), text);
  };
  for (const std::string& bad :
       {std::string(), good.substr(0, 54), good + "-more", good + "0", with(0, "ff"), with(2, "_"),
        with(3, "G"), with(36, "A"), with(3, std::string(32, '0')), with(36, std::string(16, '0')),
        std::string(4096, 'a')}) {
    EXPECT_FALSE(Context::parse(bad)) << bad;
  }
}

TEST(TraceContext, TravelsAsTwentyFourBytes) {
  const Context context{TraceId::random(), SpanId::random()};
  EXPECT_EQ(Context::from_bytes(context.to_bytes()), context);
  for (const std::string& bad : {std::string(), std::string(24, '\0'), context.to_bytes() + "x",
                                 context.to_bytes().substr(1)}) {
    EXPECT_FALSE(Context::from_bytes(bad));
  }
}

TEST(Tracer, KeepsTheNewestSpans) {
  Tracer tracer("agent", "a", 3);
  const Context parent{TraceId::random(), SpanId::random()};
  for (int i = 0; i < 5; ++i) {
    RunningSpan span(&tracer, std::to_string(i), parent);
    EXPECT_EQ(span.context().trace, parent.trace);
  }
  const auto kept = tracer.of_trace(parent.trace);
  ASSERT_EQ(kept.size(), 3u);
  EXPECT_EQ(kept[0].name, "2");
  EXPECT_EQ(kept[2].name, "4");
  EXPECT_EQ(kept[2].parent, parent.span);
  ASSERT_EQ(tracer.of_trace(parent.trace, 1).size(), 1u);
  EXPECT_EQ(tracer.of_trace(parent.trace, 1)[0].name, "4");
}

TEST(Tracer, KeepsASpanThatComesTwiceOnce) {
  Tracer tracer("coordinator", "coordinator", 2);
  Span span = some_span();
  tracer.adopt(span);
  tracer.adopt(span);
  EXPECT_EQ(tracer.of_trace(span.context.trace).size(), 1u);
  // Once it has gone, it is unknown again.
  tracer.adopt(some_span());
  tracer.adopt(some_span());
  EXPECT_TRUE(tracer.of_trace(span.context.trace).empty());
  tracer.adopt(span);
  EXPECT_EQ(tracer.of_trace(span.context.trace).size(), 1u);
}

// Makes spans of one trace, one below the other.
class SpanTree {
 public:
  Context add(const std::string& name, const Context& parent, std::chrono::milliseconds took,
              std::vector<Attribute> attributes = {}) {
    Span span = some_span();
    span.context = {trace_, SpanId::random()};
    span.parent = parent.span;
    span.name = name;
    span.duration = took;
    span.attributes = std::move(attributes);
    spans.push_back(span);
    return span.context;
  }
  std::vector<Span> spans;

 private:
  const TraceId trace_ = TraceId::random();
};

std::map<std::string, int> count_names(const std::vector<Span>& spans) {
  std::map<std::string, int> names;
  for (const Span& span : spans) ++names[span.name];
  return names;
}

TEST(MostTelling, AreTheSpansOfOneOperationOnly) {
  SpanTree tree;
  const Context command = tree.add("rekindle pull", {}, 5s);
  const Context pull = tree.add("pull", command, 2s);
  tree.add("transfer", pull, 1s);
  const Context other = tree.add("pull", command, 9s);
  tree.add("connect", other, 8s);
  const auto chosen = most_telling(tree.spans, pull, 64);
  EXPECT_EQ(count_names(chosen), (std::map<std::string, int>{{"pull", 1}, {"transfer", 1}}));
}

TEST(MostTelling, HaveThePhasesAndTheLongestOfEachSourceAndRailIfThereAreTooMany) {
  SpanTree tree;
  const Context pull = tree.add("pull", {}, 100s);
  tree.add("plan", pull, 1ms);
  std::set<Context> longest;
  for (int round = 0; round < 50; ++round) {
    const auto took = round == 20 ? 9s : 1s;
    const Context transfer = tree.add("transfer", pull, took);
    for (const char* name : {"a", "b"}) {
      const auto source = tree.add("source", transfer, took, {{std::string(kSource), name}});
      const auto rail = tree.add("rail", source, took, {{std::string(kRail), "mlx5_0"}});
      if (round == 20) longest.insert({source, rail});
    }
  }
  const auto chosen = most_telling(tree.spans, pull, 64);
  ASSERT_EQ(chosen.size(), 64u);
  auto names = count_names(chosen);
  EXPECT_EQ(names["pull"], 1);
  EXPECT_EQ(names["plan"], 1);
  EXPECT_EQ(names["transfer"], 30) << "phases take half of the places";
  std::set<Context> known;
  for (const Span& span : chosen) known.insert(span.context);
  for (const Context& context : longest) EXPECT_TRUE(known.contains(context));
  for (const Span& span : chosen) {
    EXPECT_TRUE(span.context == pull || known.contains({span.context.trace, span.parent}));
  }
}

// The longest rail is in the shortest source: it sorts before its parent.
TEST(MostTelling, HaveAChildWhoseParentSortsLaterIfThereIsRoom) {
  SpanTree tree;
  const Context pull = tree.add("pull", {}, 100s);
  const Context transfer = tree.add("transfer", pull, 99s);
  const auto source = [&](std::chrono::milliseconds took) {
    return tree.add("source", transfer, took, {{std::string(kSource), "a"}});
  };
  source(9s);
  source(8s);
  const Context last = source(1s);
  const Context rail = tree.add("rail", last, 1s, {{std::string(kRail), "mlx5_0"}});
  const auto chosen = most_telling(tree.spans, pull, 64);
  EXPECT_EQ(chosen.size(), tree.spans.size());
  EXPECT_NE(std::ranges::find(chosen, rail, &Span::context), chosen.end());
}

TEST(Tracer, FindsTheNewestOperationOnASubject) {
  Tracer tracer("coordinator", "coordinator");
  TraceId last;
  for (const char* version : {"m@1", "m@2", "mm@3"}) {
    RunningSpan span(&tracer, "pull", {});
    span.set(std::string(kOperation), "pull");
    span.set(std::string(kVersion), version);
    last = span.context().trace;
  }
  EXPECT_EQ(tracer.find("pull", "mm@3"), last);
  EXPECT_EQ(tracer.find("pull", "m"), tracer.find("pull", "m@2"));
  EXPECT_NE(tracer.find("pull", "m@1"), tracer.find("pull", "m@2"));
  EXPECT_TRUE(tracer.find("pull", "m@3").is_nil());
  EXPECT_TRUE(tracer.find("update", "m@2").is_nil());
}

TEST(RunningSpan, WithoutATracerPassesItsParentOn) {
  const Context parent{TraceId::random(), SpanId::random()};
  RunningSpan none(nullptr, "x", parent);
  none.set("key", "value");
  none.end();
  EXPECT_EQ(none.context(), parent);
}

TEST(RunningSpan, EndsOnceAndSaysWhyItFailed) {
  Tracer tracer("agent", "a");
  RunningSpan span(&tracer, "pull", {});
  const TraceId trace = span.context().trace;
  RunningSpan moved = std::move(span);
  moved.end(Result<void>(fail(ErrorCode::kTimeout, "no answer")));
  moved.end();
  ASSERT_EQ(tracer.of_trace(trace).size(), 1u);
  EXPECT_EQ(tracer.of_trace(trace)[0].error, "no answer");
}

TEST(SpanMessage, BringsEverythingBack) {
  const Span span = some_span();
  const auto back = from_proto(to_proto(span));
  ASSERT_TRUE(back);
  EXPECT_EQ(back->context, span.context);
  EXPECT_EQ(back->parent, span.parent);
  EXPECT_EQ(back->name, span.name);
  EXPECT_EQ(back->node, span.node);
  EXPECT_EQ(back->start, span.start);
  EXPECT_EQ(back->duration, span.duration);
  EXPECT_EQ(back->attributes, span.attributes);
  EXPECT_EQ(back->error, span.error);
}

TEST(SpanMessage, IsBoundedAndRefusesWrongIds) {
  Span span = some_span();
  // The cut must not halve a character: a message with half of one does not parse.
  span.error = std::string(511, 'x') + "…" + std::string(100'000, 'y');
  const std::string bytes = to_proto(span).SerializeAsString();
  EXPECT_LT(bytes.size(), 2000u);
  proto::Span message;
  ASSERT_TRUE(message.ParseFromString(bytes));
  EXPECT_EQ(message.error(), std::string(511, 'x'));
  for (int i = 0; i < 1000; ++i) message.add_attributes()->set_key("k");
  ASSERT_TRUE(from_proto(message));
  EXPECT_LE(from_proto(message)->attributes.size(), 32u);
  message.set_duration_ns(~std::uint64_t{0});
  EXPECT_GT(from_proto(message)->duration.count(), 0);
  // Together they have the right length.
  proto::Span shifted = message;
  shifted.set_trace_id(message.trace_id() + message.span_id().substr(0, 1));
  shifted.set_span_id(message.span_id().substr(1));
  EXPECT_FALSE(from_proto(shifted));
  message.set_parent_id("short");
  EXPECT_FALSE(from_proto(message));
}

TEST(OtlpJson, HasTheShapeThatCollectorsTake) {
  const Span span = some_span();
  Span root = some_span();
  root.parent = {};
  root.error = "";
  root.name = "\xff not UTF-8";
  const std::vector<Span> spans{span, root};
  const auto body = nlohmann::json::parse(to_otlp_json(spans));
  const auto& process = body.at("resourceSpans").at(0);
  EXPECT_EQ(process.at("resource").at("attributes").at(0).at("key"), "service.name");
  EXPECT_EQ(process.at("resource").at("attributes").at(0).at("value").at("stringValue"),
            "rekindle-agent");
  const auto& list = process.at("scopeSpans").at(0).at("spans");
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0].at("traceId"), span.context.trace.hex());
  EXPECT_EQ(list[0].at("spanId"), span.context.span.hex());
  EXPECT_EQ(list[0].at("parentSpanId"), span.parent.hex());
  EXPECT_EQ(list[0].at("startTimeUnixNano"), "1700000000123456789");
  EXPECT_EQ(list[0].at("endTimeUnixNano"), "1700000000128456789");
  EXPECT_EQ(list[0].at("attributes").at(0).at("value").at("stringValue"), "a");
  EXPECT_EQ(list[0].at("attributes").at(1).at("value").at("intValue"), "1099511627776");
  EXPECT_EQ(list[0].at("status").at("code"), 2);
  EXPECT_FALSE(list[1].contains("parentSpanId"));
  EXPECT_FALSE(list[1].contains("status"));
}

}  // namespace
}  // namespace rekindle::trace
