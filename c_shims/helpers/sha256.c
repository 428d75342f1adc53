#include "sha256.h"

#include <stdio.h>
#include <string.h>

static const uint32_t k[64] = {
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
	0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
	0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
	0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t x, int n)
{
	return x >> n | x << (32 - n);
}

/* One of the 64 steps. The eight words of state turn by one place each time; the arguments turn instead. */
#define STEP(a, b, c, d, e, f, g, h, i)                                                                                \
	do {                                                                                                           \
		uint32_t t = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + k[i] + w[i];  \
		d += t;                                                                                                \
		h = t + (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));                \
	} while (0)

static void block(uint32_t h[8], const uint8_t *data)
{
	uint32_t w[64], v[8];

	for (int i = 0; i < 16; i++, data += 4)
		w[i] = (uint32_t)data[0] << 24 | (uint32_t)data[1] << 16 | (uint32_t)data[2] << 8 | data[3];
	for (int i = 16; i < 64; i++)
		w[i] = w[i - 16] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
		       (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
	memcpy(v, h, sizeof(v));
	for (int i = 0; i < 64; i += 8) {
		STEP(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], i);
		STEP(v[7], v[0], v[1], v[2], v[3], v[4], v[5], v[6], i + 1);
		STEP(v[6], v[7], v[0], v[1], v[2], v[3], v[4], v[5], i + 2);
		STEP(v[5], v[6], v[7], v[0], v[1], v[2], v[3], v[4], i + 3);
		STEP(v[4], v[5], v[6], v[7], v[0], v[1], v[2], v[3], i + 4);
		STEP(v[3], v[4], v[5], v[6], v[7], v[0], v[1], v[2], i + 5);
		STEP(v[2], v[3], v[4], v[5], v[6], v[7], v[0], v[1], i + 6);
		STEP(v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[0], i + 7);
	}
	for (int i = 0; i < 8; i++)
		h[i] += v[i];
}

void sha256(const uint8_t *data, size_t length, char hex[65])
{
	uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
	uint8_t last[128] = {0};
	size_t rest = length % 64, end = rest < 56 ? 64 : 128;

	for (size_t i = 0; i + 64 <= length; i += 64)
		block(h, data + i);
	if (rest)
		memcpy(last, data + length - rest, rest);
	last[rest] = 0x80;
	for (int i = 0; i < 8; i++)
		last[end - 1 - (size_t)i] = (uint8_t)((uint64_t)length * 8 >> 8 * i);
	block(h, last);
	if (end == 128)
		block(h, last + 64);
	for (int i = 0; i < 8; i++)
		snprintf(hex + (size_t)i * 8, 9, "%08x", h[i]);
}
