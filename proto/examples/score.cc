// Scores a sentence and takes two steps of a beam search, by gRPC.
// Usage: score [HOST:PORT] [TOKEN]

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "dlm/v1/lm.grpc.pb.h"

namespace {

struct Hypothesis {
  std::vector<std::string> words;
  float total;
  std::string state;
};

void Prepare(grpc::ClientContext& context, const std::string& token) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
}

bool Failed(const grpc::Status& status) {
  if (status.ok()) return false;
  std::fprintf(stderr, "%d: %s\n", status.error_code(), status.error_message().c_str());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string address = argc > 1 ? argv[1] : "localhost:50070";
  const std::string token = argc > 2 ? argv[2] : "";
  auto stub = dlm::v1::LanguageModel::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));

  {
    grpc::ClientContext context;
    Prepare(context, token);
    dlm::v1::SentencesRequest request;
    request.add_sentences("the man went home");
    dlm::v1::SentencesReply reply;
    if (Failed(stub->Score(&context, request, &reply))) return 1;
    std::printf("%.9g", reply.scores(0).log10_prob());
    for (float log10_prob : reply.scores(0).log10_probs()) std::printf(" %.9g", log10_prob);
    std::printf("\n");
  }

  // A beam of two: each step scores every word after every state, and keeps the two best.
  std::vector<Hypothesis> beam = {{{}, 0.0F, ""}};
  const std::vector<std::vector<std::string>> steps = {{"the", "a", "there"}, {"man", "is"}};
  for (const auto& words : steps) {
    grpc::ClientContext context;
    Prepare(context, token);
    dlm::v1::ExtendRequest request;
    for (const auto& one : beam) request.add_states(one.state);
    for (const auto& word : words) request.add_words(word);
    dlm::v1::ExtendReply reply;
    if (Failed(stub->Extend(&context, request, &reply))) return 1;
    std::vector<Hypothesis> next;
    int at = 0;
    for (const auto& one : beam) {
      for (const auto& word : words) {
        auto longer = one.words;
        longer.push_back(word);
        next.push_back({longer, one.total + reply.log10_probs(at), reply.states(at)});
        ++at;
      }
    }
    std::stable_sort(next.begin(), next.end(),
                     [](const auto& a, const auto& b) { return a.total > b.total; });
    next.resize(std::min<size_t>(next.size(), 2));
    beam = next;
  }
  for (const auto& one : beam) {
    std::printf("%.9g", one.total);
    for (const auto& word : one.words) std::printf(" %s", word.c_str());
    std::printf("\n");
  }
  return 0;
}
