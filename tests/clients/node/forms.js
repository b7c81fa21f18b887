// What the tests ask the clients for, as in ../forms.py.
import { z } from "zod";

export const GENERATING = process.env.SHARDLINE_URL;
export const POOLING = process.env.SHARDLINE_POOLING_URL;

export const QUESTION = "What does os.path.join do?";
export const ANSWER = /Join two or more pathname components/;

export const Person = z.strictObject({ name: z.string().max(12), age: z.number().int().min(0).max(150) });
export const Topic = z.strictObject({ topic: z.string().max(12) });
