// Asks a gateway by C++'s gRPC. Each line of its input is a call: its name, and its request in hex.
// It prints a line per reply, three lists with commas between: the bits of the log10 probabilities
// in hex, the matched orders, and the states in hex.
// Usage: ask HOST:PORT

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>

#include "dlm/v1/lm.grpc.pb.h"

namespace {

std::string Bytes(const std::string& hex) {
  std::string bytes;
  for (size_t at = 0; at + 1 < hex.size(); at += 2)
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(at, 2), nullptr, 16)));
  return bytes;
}

template <typename Lists>
void Print(const Lists& lists) {
  for (float number : lists.log10_probs()) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    std::printf("%08x ", bits);
  }
  std::printf(",");
  for (uint32_t order : lists.matched_orders()) std::printf("%u ", order);
  std::printf(",");
}

void Check(const grpc::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%d: %s\n", status.error_code(), status.error_message().c_str());
  std::exit(1);
}

}  // namespace

int main(int, char** argv) {
  auto stub = dlm::v1::LanguageModel::NewStub(
      grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  std::string call, hex;
  while (std::cin >> call >> hex) {
    grpc::ClientContext context;
    if (call == "Score") {
      dlm::v1::SentencesRequest request;
      dlm::v1::SentencesReply reply;
      request.ParseFromString(Bytes(hex));
      Check(stub->Score(&context, request, &reply));
      Print(reply.scores(0));
    } else {
      dlm::v1::ExtendRequest request;
      dlm::v1::ExtendReply reply;
      request.ParseFromString(Bytes(hex));
      Check(stub->Extend(&context, request, &reply));
      Print(reply);
      for (const auto& state : reply.states()) {
        for (unsigned char byte : state) std::printf("%02x", byte);
        std::printf(" ");
      }
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}
